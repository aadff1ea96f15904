"""Limits of requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one request, so that no request can exhaust the machine."""

    max_n: int = 128
    max_logprobs: int = 128
    max_prompt_logprobs_entries: int = 2**22  # positions of a prompt times tokens per position
    max_stop_strings: int = 64
    max_stop_string_length: int = 1024  # characters
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 4096
    max_allowed_token_ids: int = 2**20
    max_logprobs_entries: int = 2**22  # output tokens of a prompt times tokens per position, with logprobs=-1
    max_kv_addresses: int = 64  # addresses of another engine's ranks
    max_grammar_length: int = 2**17  # characters of a schema, regular expression or grammar
    max_choices: int = 2048
    max_nesting: int = 128  # depth of arrays and objects in the JSON of a request
    max_containers: int = 2**16  # arrays and objects in the JSON of a request
    max_prompts: int = 1024  # prompts of one call
    max_outputs: int = 1024  # outputs of all prompts of one call together
    max_messages: int = 4096
    max_parts: int = 4096  # content parts of a message; also tool calls of a message
    max_tools: int = 512
    max_fields: int = 1024  # fields of an object, and entries of lists without a limit of their own
    max_token_ids: int = 2**20  # token ids of a prompt, or to be detokenised
    max_text_length: int = 2**20  # characters to be tokenised


LIMITS = Limits()
