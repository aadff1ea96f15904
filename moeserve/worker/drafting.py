"""Speculation on a rank: drafts of a request's next tokens, and which of them are accepted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from moeserve.config.settings import EngineConfig, SpeculativeConfig
from moeserve.models.decoder import Decoder
from moeserve.protocol import ChunkResult, TokenLogprobs
from moeserve.step_inputs import StepInputs
from moeserve.worker.request_table import Chunk, RequestState
from moeserve.worker.sampler import SampledToken
from moeserve.worker.step_memory import StepMemory
from moeserve.worker.token_history import TokenHistory

# T tokens of the step, L rows that are sampled, S chunks that sample, D model width

NO_DRAFT = -1  # in place of a token


@dataclass(frozen=True, kw_only=True)
class SampledStep:
    """A step whose tokens have been sampled, as the device computes it."""

    inputs: StepInputs  # as it ran, with its padding
    chunks: Sequence[Chunk]
    hidden_TD: Tensor  # of all rows, after the last norm
    tokens_L: Tensor | None  # sampled tokens, on the first tp rank; None: no chunk samples
    num_sampling: tuple[int, ...]  # chunks that sample, by replica


class StepBuilder(Protocol):
    """Builds the tensors of a step; see `ModelRunner`."""

    memory: StepMemory

    def build_inputs(
        self, chunks: Sequence[Chunk], num_tokens: tuple[int, ...], padded_to: int | None = None
    ) -> StepInputs: ...


class Drafter(Protocol):
    """Guesses the tokens after those of a step."""

    def start(self, step: SampledStep, builder: StepBuilder) -> list[Tensor]:
        """Begin to draft on the device. Return the tensors that `propose` takes on the host. Collective: all ranks."""
        ...

    def propose(
        self, request: RequestState, new_token_ids: Sequence[int], index: int, on_host: Sequence[Tensor]
    ) -> list[int]:
        """Return drafts of the tokens after `new_token_ids`, which the request's table does not have yet.

        Args:
            index: of the request's chunk among those that sample.
        """
        ...


class NgramDrafter:
    """Guesses that the last tokens of a request continue as they did where they occurred before, in prompt or output.

    The method is prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def start(self, step: SampledStep, builder: StepBuilder) -> list[Tensor]:
        return []

    def propose(
        self, request: RequestState, new_token_ids: Sequence[int], index: int, on_host: Sequence[Tensor]
    ) -> list[int]:
        if request.history is None:
            request.history = TokenHistory()
        history, config = request.history, self._config
        history.extend(request.token_ids[history.num_tokens :])
        history.extend(new_token_ids)
        return history.continuation(config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)


class LayerDrafter:
    """Guesses tokens with the model's layer for multi-token prediction (MTP), one in each pass of the layer.

    The first pass runs on all rows of a step. The layer's keys and values at a position depend on the next token, which
    is known by then: behind an accepted draft it is the token that was sampled. The last position of a block that
    requests share may have the next token of another request; this can make a draft worse, but changes no result.

    Each later pass runs on one row of each request, at the next position: on the layer's own hidden state and the token
    that it has just drafted. The next step overwrites the keys and values of these rows and of rejected drafts.
    """

    def __init__(self, model: Decoder, caches: list[Any], *, num_tokens: int, block_size: int) -> None:
        """
        Args:
            num_tokens: that are drafted after each step.
        """
        self._model = model
        self._caches = caches
        self._num_tokens = num_tokens
        self._block_size = block_size

    def start(self, step: SampledStep, builder: StepBuilder) -> list[Tensor]:
        model, inputs, tokens_L = self._model, step.inputs, step.tokens_L
        following = [
            token_id
            for chunk in step.chunks
            for token_id in (*chunk.token_ids[1:], 0 if chunk.samples else chunk.request.token_ids[chunk.end])
        ]
        following += [0] * (len(step.hidden_TD) - len(following))  # padding
        (next_ids_T,) = builder.memory.upload([np.array(following, np.int64)])
        if tokens_L is not None:
            tokens_L = model.groups.tp.broadcast(tokens_L, 0)  # collective: tp ranks
            next_ids_T.index_copy_(0, inputs.logits_rows, tokens_L)
        hidden_TD = model.draft(inputs, next_ids_T, step.hidden_TD, self._caches)
        if tokens_L is None:
            rows_S = inputs.logits_rows  # none
        else:
            sampling = [chunk for chunk in step.chunks if chunk.samples]
            rows_S = inputs.logits_rows.index_select(0, _last_rows(tokens_L, sampling, builder.memory))
        hidden_SD = hidden_TD.index_select(0, rows_S)
        first_S = self._choose(hidden_SD)
        if self._num_tokens == 1 or not any(step.num_sampling):
            return [first_S]
        positions = inputs.positions.index_select(0, rows_S).tolist()  # a GPU's host waits here
        return [first_S, *self._continue(step, positions, hidden_SD, first_S, builder)]

    def _continue(
        self, step: SampledStep, positions: Sequence[int], hidden_SD: Tensor, ids_S: Tensor, builder: StepBuilder
    ) -> list[Tensor]:
        """Run the later passes, and return their drafts [S]. Collective: all ranks, in as many passes.

        Args:
            positions: of each chunk's row in the first pass.
            hidden_SD: the layer's hidden states in these rows.
            ids_S: the tokens that were drafted from them.
        """
        sampling = [chunk for chunk in step.chunks if chunk.samples]
        ends = [chunk.request.num_blocks * self._block_size for chunk in sampling]
        drafts: list[Tensor] = []
        for distance in range(1, self._num_tokens):
            chunks = [
                Chunk(chunk.slot, min(position + distance, end - 1), [0], chunk.request, True, prompt_targets=())
                for chunk, position, end in zip(sampling, positions, ends, strict=True)
            ]
            inputs = builder.build_inputs(chunks, step.num_sampling)
            lacks_block = [position + distance >= end for position, end in zip(positions, ends, strict=True)]
            if any(lacks_block):
                (lacks_block_S,) = builder.memory.upload([np.array(lacks_block, np.bool_)])
                inputs = _without_cache(inputs, lacks_block_S)
            hidden_SD = self._model.draft(inputs, ids_S, hidden_SD, self._caches)
            ids_S = self._choose(hidden_SD)
            drafts.append(ids_S.masked_fill(lacks_block_S, NO_DRAFT) if any(lacks_block) else ids_S)
        return drafts

    def _choose(self, hidden_SD: Tensor) -> Tensor:
        """Return the most likely token of each row. Collective: tp ranks."""
        if not len(hidden_SD):
            return torch.zeros(0, dtype=torch.int64, device=hidden_SD.device)
        return self._model.logits(hidden_SD).argmax(dim=-1)

    def propose(
        self, request: RequestState, new_token_ids: Sequence[int], index: int, on_host: Sequence[Tensor]
    ) -> list[int]:
        return list(itertools.takewhile(lambda token_id: token_id != NO_DRAFT, (int(each[index]) for each in on_host)))


def drafter_of(config: EngineConfig, model: Decoder, caches: list[Any]) -> Drafter | None:
    """Return what drafts tokens on this rank; None: without speculation."""
    speculation = config.speculative_config
    if speculation is None:
        return None
    if not config.has_draft_layer:
        return NgramDrafter(speculation)
    return LayerDrafter(model, caches, num_tokens=speculation.num_speculative_tokens, block_size=config.block_size)


def _without_cache(step: StepInputs, is_without_T: Tensor) -> StepInputs:
    """Return the step without room in the cache for some rows: their keys and values are not kept."""
    windows = step.window_blocks
    if windows is not None:
        windows = windows._replace(cache_slots=windows.cache_slots.masked_fill(is_without_T, -1))
    return dataclasses.replace(step, cache_slots=step.cache_slots.masked_fill(is_without_T, -1), window_blocks=windows)


def _last_rows(tokens_L: Tensor, sampling: Sequence[Chunk], memory: StepMemory) -> Tensor:
    """Return [S], for each chunk the sampled row behind its last accepted draft.

    Args:
        tokens_L: sampled from all rows.
        sampling: the chunks.
    """
    counts = [chunk.num_sampled for chunk in sampling]
    drafted = [token_id for chunk in sampling for token_id in (*chunk.drafts, NO_DRAFT)]
    arrays = np.array(drafted, np.int64), np.repeat(np.arange(len(counts)), counts), np.cumsum(counts) - 1
    drafted_L, chunk_of_row_L, last_S = memory.upload(arrays)
    rows_L = torch.arange(len(tokens_L), device=tokens_L.device)
    wrong_L = torch.where(tokens_L == drafted_L, len(tokens_L), rows_L)
    return last_S.scatter_reduce(0, chunk_of_row_L, wrong_L, "amin")


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
