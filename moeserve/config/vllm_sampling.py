"""Sampling parameters of vLLM that have no effect here: values that change nothing are accepted, others refused."""

from __future__ import annotations

from typing import Any

from moeserve.config.vllm_option import VllmOption
from moeserve.errors import RequestError, shown

_PARAMETERS = {
    "best_of": VllmOption("only as many outputs as are returned are computed; set n, and choose among the outputs"),
    "use_beam_search": VllmOption("use LLM.beam_search", (None, False)),
    "length_penalty": VllmOption("it belongs to beam search; use LLM.beam_search", (None, 1.0)),
    "early_stopping": VllmOption("it belongs to beam search; use LLM.beam_search", (None, False)),
    "logits_processors": VllmOption(
        "code of requests is never run; use logit_bias, allowed_token_ids, bad_words or structured_outputs", (None, [])
    ),
    "extra_args": VllmOption("nothing reads such arguments; leave them out", (None, {})),
    "spaces_between_special_tokens": VllmOption("no spaces are added between tokens", is_harmless=True),
    "skip_clone": VllmOption("parameters are always copied", is_harmless=True),
    "skip_reading_prefix_cache": VllmOption("it does not change the output; use cache_salt", is_harmless=True),
    "output_text_buffer_length": VllmOption("text is held back while it may begin a stop string", is_harmless=True),
    "stream_interval": VllmOption("a stream yields each new output", (None, 1)),
    "flat_logprobs": VllmOption("log-probabilities are dicts", (None, False)),
    "logprob_token_ids": VllmOption("use logprobs, also -1 for all tokens", (None, [])),
    "prompt_logprob_token_ids": VllmOption("use prompt_logprobs, also -1 for all tokens", (None, [])),
    "prompt_logprob_start": VllmOption("prompt_logprobs are those of the whole prompt", (None, 0)),
    "routed_experts_prompt_start": VllmOption("experts of tokens are not returned", (None, 0)),
    "thinking_token_budget": VllmOption("the length of reasoning is not limited; use max_tokens"),
    "repetition_detection": VllmOption("use repetition_penalty or frequency_penalty"),
    "watermarking": VllmOption("outputs have no watermark", (None, False)),
}

NAMES = frozenset(_PARAMETERS)


def require_harmless(name: str, value: Any, num_outputs: int) -> None:
    """Raise RequestError for a value that would change the output.

    Args:
        name: one of NAMES.
        num_outputs: the `n` of the request.
    """
    parameter = _PARAMETERS[name]
    is_count_of_outputs = name == "best_of" and value == num_outputs
    if not is_count_of_outputs and not parameter.accepts(value):
        raise RequestError(
            f"{name}={shown(value)} is not supported: {parameter.why}", parameter=name, code="unsupported_parameter"
        )
