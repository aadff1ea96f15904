"""Prompts as dicts, with vLLM's names."""

from __future__ import annotations

from typing import TypedDict


class _Salted(TypedDict, total=False):
    cache_salt: str  # only prompts with equal salts share cached prefixes


class TextPrompt(_Salted):
    """A text to continue."""

    prompt: str


class _WithText(_Salted, total=False):
    prompt: str  # the text of the tokens, for `RequestOutput.prompt`


class TokensPrompt(_WithText):
    """Token ids to continue."""

    prompt_token_ids: list[int]
