"""Speculation on a rank: drafts of a request's next tokens, and which of them are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moeserve.config.settings import SpeculativeConfig
from moeserve.protocol import ChunkResult, TokenLogprobs
from moeserve.worker.request_table import RequestState
from moeserve.worker.sampler import SampledToken
from moeserve.worker.token_history import TokenHistory


class Drafter(Protocol):
    """Guesses the next tokens of requests."""

    def propose(self, request: RequestState, new_token_ids: Sequence[int]) -> list[int]:
        """Return drafts of the tokens after `new_token_ids`, which the request's table does not have yet."""
        ...


class NgramDrafter:
    """Guesses that the last tokens of a request continue as they did where they occurred before, in prompt or output.

    The method is prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def propose(self, request: RequestState, new_token_ids: Sequence[int]) -> list[int]:
        if request.history is None:
            request.history = TokenHistory()
        history, config = request.history, self._config
        history.extend(request.token_ids[history.num_tokens :])
        history.extend(new_token_ids)
        return history.continuation(config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)


def accepted_tokens(drafts: Sequence[int], rows: Sequence[SampledToken]) -> ChunkResult:
    """Return the tokens that were sampled after a request's last token and after each draft, up to the first wrong one.

    A draft is right if it is the token that was sampled in its place. The random number of a token depends on the
    seed and the position alone, so the tokens are those that a step for each of them would have sampled.

    Args:
        rows: one more than drafts. After an accepted draft, a row with an error ends the tokens: the next step begins
            with this row, and meets the error as it would without drafts.
    """
    first = rows[0]
    if first.error is not None:
        return ChunkResult(error=first.error)
    token_ids, logprobs = [first.token_id], _listed(first)
    for draft, row in zip(drafts, rows[1:], strict=True):
        if draft != token_ids[-1] or row.error is not None:
            break
        token_ids.append(row.token_id)
        logprobs += _listed(row)
    return ChunkResult(token_ids=token_ids, logprobs=logprobs)


def _listed(row: SampledToken) -> list[TokenLogprobs]:
    return [] if row.logprobs is None else [row.logprobs]
