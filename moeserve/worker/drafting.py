"""Speculation on a rank: drafts of a request's next tokens, and which of them are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from moeserve.config.settings import SpeculativeConfig
from moeserve.models.decoder import Decoder
from moeserve.protocol import ChunkResult, TokenLogprobs
from moeserve.step_inputs import StepInputs
from moeserve.worker.request_table import Chunk, RequestState
from moeserve.worker.sampler import SampledToken, Upload
from moeserve.worker.token_history import TokenHistory

# T tokens of the step, L rows that are sampled, D model width


class Drafter(Protocol):
    """Guesses the tokens after those of a step."""

    def start(
        self, step: StepInputs, chunks: Sequence[Chunk], hidden_TD: Tensor, tokens_L: Tensor | None, upload: Upload
    ) -> list[Tensor]:
        """Begin to draft on the device. Return the tensors that `propose` takes on the host. Collective: all ranks.

        Args:
            step: as it ran, with its padding.
            hidden_TD: of all rows, after the last norm.
            tokens_L: the tokens that were sampled, on the first tp rank; None: no chunk samples.
        """
        ...

    def propose(
        self, request: RequestState, new_token_ids: Sequence[int], row: int, on_host: Sequence[Tensor]
    ) -> list[int]:
        """Return drafts of the tokens after `new_token_ids`, which the request's table does not have yet.

        Args:
            row: among the sampled rows, the one of the last new token.
        """
        ...


class NgramDrafter:
    """Guesses that the last tokens of a request continue as they did where they occurred before, in prompt or output.

    The method is prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def start(
        self, step: StepInputs, chunks: Sequence[Chunk], hidden_TD: Tensor, tokens_L: Tensor | None, upload: Upload
    ) -> list[Tensor]:
        return []

    def propose(
        self, request: RequestState, new_token_ids: Sequence[int], row: int, on_host: Sequence[Tensor]
    ) -> list[int]:
        if request.history is None:
            request.history = TokenHistory()
        history, config = request.history, self._config
        history.extend(request.token_ids[history.num_tokens :])
        history.extend(new_token_ids)
        return history.continuation(config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)


class LayerDrafter:
    """Guesses one token with the model's layer for multi-token prediction.

    The layer runs on all rows of a step. Its keys and values at a position depend on the next token, which is known by
    then: behind an accepted draft it is the token that was sampled. Those behind a rejected draft are overwritten by
    the next step. The last position of a block that requests share may have the next token of another request; this
    can make a draft worse, but changes no result.
    """

    def __init__(self, model: Decoder, caches: list[Any]) -> None:
        self._model = model
        self._caches = caches

    def start(
        self, step: StepInputs, chunks: Sequence[Chunk], hidden_TD: Tensor, tokens_L: Tensor | None, upload: Upload
    ) -> list[Tensor]:
        following = [
            token_id
            for chunk in chunks
            for token_id in (*chunk.token_ids[1:], 0 if chunk.samples else chunk.request.token_ids[chunk.end])
        ]
        following += [0] * (len(hidden_TD) - len(following))  # padding
        (next_ids_T,) = upload([np.array(following, np.int64)])
        if tokens_L is not None:
            tokens_L = self._model.groups.tp.broadcast(tokens_L, 0)  # collective: tp ranks
            next_ids_T.index_copy_(0, step.logits_rows, tokens_L)
        drafted_TD = self._model.draft(step, next_ids_T, hidden_TD, self._caches)
        if tokens_L is None:
            return []
        return [self._model.logits(drafted_TD.index_select(0, step.logits_rows)).argmax(dim=-1)]

    def propose(
        self, request: RequestState, new_token_ids: Sequence[int], row: int, on_host: Sequence[Tensor]
    ) -> list[int]:
        (drafts_L,) = on_host
        return [int(drafts_L[row])]


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
