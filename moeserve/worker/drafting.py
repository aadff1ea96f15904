"""Speculative decoding on a rank: drafting the next tokens of requests, and accepting drafts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from moeserve.config.engine_config import EngineConfig
from moeserve.config.settings import SpeculativeConfig
from moeserve.models.decoder import Decoder
from moeserve.models.rank_model import RankModel
from moeserve.protocol import ChunkResult, TokenLogprobs
from moeserve.step_inputs import StepInputs
from moeserve.worker.request_table import Chunk, RequestState
from moeserve.worker.sampler import SampledToken
from moeserve.worker.step_memory import StepMemory
from moeserve.worker.token_history import TokenHistory

# S chunks that sample

NO_DRAFT = -1  # marks a missing draft token


@dataclass(frozen=True, kw_only=True)
class SampledStep:
    """A step whose tokens have been sampled, as tensors that the device may still compute."""

    inputs: StepInputs  # inputs of the step, including padding
    chunks: Sequence[Chunk]
    hidden_TD: Tensor  # hidden states of all rows, after the final norm
    tokens_L: Tensor | None  # sampled tokens, on the first tp rank; None: no chunk samples
    num_sampling: tuple[int, ...]  # number of chunks that sample on each replica


class StepBuilder(Protocol):
    """Builds the tensors of a step; see `ModelRunner`."""

    memory: StepMemory

    def build_inputs(
        self, chunks: Sequence[Chunk], num_tokens: tuple[int, ...], padded_to: int | None = None
    ) -> StepInputs: ...


class Drafter(Protocol):
    """The drafting of the tokens that follow a step."""

    def start(self, step: SampledStep, builder: StepBuilder) -> list[Tensor]:
        """Start to draft on the device. Return the tensors that `propose` needs on the host. Collective: all ranks."""
        ...

    def propose(
        self, request: RequestState, new_token_ids: Sequence[int], index: int, on_host: Sequence[Tensor]
    ) -> list[int]:
        """Return drafts of the tokens after `new_token_ids`.

        Args:
            new_token_ids: sampled tokens that the request's table does not have yet.
            index: index of the request's chunk among the chunks that sample.
        """
        ...


class NgramDrafter:
    """A drafter by prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).

    If the last tokens of a request have occurred before in its prompt or output, the drafts are the tokens that
    followed there.
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
    """A drafter with the model's multi-token prediction (MTP) layer, which drafts one token in each pass.

    The first pass runs on all rows of a step. The layer's keys and values at a position depend on the next token, which
    is known then: after an accepted draft it is the sampled token. The last position of a block shared by several
    requests may depend on the next token of another request. This can make a draft worse, but does not change results.

    Each later pass runs on one row of each request, at the next position. Its inputs are the layer's own hidden state
    and the token just drafted. The next step overwrites the keys and values of these rows and of rejected drafts.
    """

    def __init__(self, model: Decoder, caches: list[Any], *, num_tokens: int, block_size: int) -> None:
        """
        Args:
            num_tokens: number of tokens to draft after each step.
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
            rows_S = inputs.logits_rows  # empty
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
        """Run the later passes, and return the drafts [S] of each. Collective: all ranks, with as many passes.

        Args:
            positions: position of each chunk's row in the first pass.
            hidden_SD: hidden states of the layer in these rows.
            ids_S: tokens drafted from these hidden states.
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


def drafter_of(config: EngineConfig, model: RankModel, caches: list[Any]) -> Drafter | None:
    """Return the drafter of this rank; None without speculative decoding."""
    speculation = config.schedule.speculative_config
    if speculation is None:
        return None
    if not config.schedule.has_draft_layer:
        return NgramDrafter(speculation)
    assert isinstance(model, Decoder), "other models have no layer for drafts"
    return LayerDrafter(
        model, caches, num_tokens=speculation.num_speculative_tokens, block_size=config.cache.block_size
    )


def _without_cache(step: StepInputs, is_without_T: Tensor) -> StepInputs:
    """Return the step without cache slots for the given rows, so that their keys and values are not stored."""

    def without(cache_slots: Tensor) -> Tensor:
        return cache_slots.masked_fill(is_without_T, -1)

    others = tuple(table._replace(cache_slots=without(table.cache_slots)) for table in step.other_tables)
    return dataclasses.replace(step, cache_slots=without(step.cache_slots), other_tables=others)


def _last_rows(tokens_L: Tensor, sampling: Sequence[Chunk], memory: StepMemory) -> Tensor:
    """Return [S]: for each chunk, the sampled row after its last accepted draft.

    Args:
        tokens_L: tokens sampled from all rows.
        sampling: the chunks that sample.
    """
    counts = [chunk.num_sampled for chunk in sampling]
    drafted = [token_id for chunk in sampling for token_id in (*chunk.drafts, NO_DRAFT)]
    arrays = np.array(drafted, np.int64), np.repeat(np.arange(len(counts)), counts), np.cumsum(counts) - 1
    drafted_L, chunk_of_row_L, last_S = memory.upload(arrays)
    rows_L = torch.arange(len(tokens_L), device=tokens_L.device)
    wrong_L = torch.where(tokens_L == drafted_L, len(tokens_L), rows_L)
    return last_S.scatter_reduce(0, chunk_of_row_L, wrong_L, "amin")


def accepted_tokens(drafts: Sequence[int], rows: Sequence[SampledToken]) -> ChunkResult:
    """Return the accepted drafts, and the token sampled after them.

    A draft is accepted if it equals the token that was sampled at its position, and all drafts before it are accepted.
    The random number of a token depends only on the seed and the position, so the result is the same as if each token
    were sampled in a separate step.

    Args:
        drafts: drafts of the next tokens.
        rows: the sampled tokens, one more than drafts. A row with an error after an accepted draft ends the result. The
            next step begins with this row, and gets the same error as without drafts.
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
