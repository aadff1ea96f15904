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
from moeserve.worker.device_copies import DeviceCopies
from moeserve.worker.request_table import Chunk, RequestState
from moeserve.worker.sampler import SampledToken
from moeserve.worker.token_history import TokenHistory

# T rows of a step, D values of a hidden state, L sampled tokens, C chunks, S chunks that sample, N modules

NO_DRAFT = -1  # marks a missing draft token


@dataclass(frozen=True, kw_only=True)
class SampledStep:
    """A step whose tokens have been sampled. The device may still be computing the tensors."""

    inputs: StepInputs  # inputs of the step, including padding
    chunks: Sequence[Chunk]
    hidden_TD: Tensor  # hidden states of all rows, after the final norm
    tokens_L: Tensor | None  # sampled tokens, on the first tp rank; None: no chunk samples
    num_tokens: tuple[int, ...]  # number of tokens of each replica
    num_sampling: tuple[int, ...]  # number of chunks that sample on each replica


class StepBuilder(Protocol):
    """Builds the tensors of a step; see `ModelRunner`."""

    copies: DeviceCopies

    def build_inputs(
        self, chunks: Sequence[Chunk], num_tokens: tuple[int, ...], padded_to: int | None = None
    ) -> StepInputs: ...


class Drafter(Protocol):
    """Drafts the tokens that follow a step."""

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


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The inputs of one pass of the MTP modules over the rows of a step."""

    inputs: StepInputs
    hidden_TD: Tensor  # input of the first module
    later_ids_T: Tensor  # input of the first module: for each row, the token after the row's token
    rows_S: Tensor  # the rows that draft
    ends_C: Tensor  # the last row of each chunk
    known_NC: Tensor  # for each later module, the input tokens of the rows `ends_C`, except in rows that draft


class ModuleDrafter:
    """A drafter with the model's N modules for multi-token prediction (MTP), each of which drafts one token.

    The modules run one after another on all rows of a step. At each position, a module reads two inputs: the hidden
    state of the previous module at this position, and a token that is one position later than that of the previous
    module. At the last position this is the token that the previous module has drafted. A module's keys and values
    therefore depend on N - 1 tokens that may prove wrong. The rows of these positions are computed again with the next
    step, for which the model's hidden states are kept (`KeptRows`).

    Further tokens are drafted from N rows of each request at the next positions. Their hidden states are those from
    which the last N tokens were drafted, instead of the model's. If layers cache nothing for drafts (`redoes_drafts`),
    all rows after those of the step are computed each time. The next step overwrites the keys and values of these rows
    and of rejected drafts.

    The last positions of a block shared by several requests may depend on the next tokens of another request. This can
    make a draft worse, but does not change results.
    """

    def __init__(self, model: Decoder, caches: list[Any], *, num_tokens: int, num_slots: int) -> None:
        """
        Args:
            num_tokens: number of tokens to draft after each step.
            num_slots: number of slots of requests.
        """
        self._model = model
        self._caches = caches
        self._num_tokens = num_tokens
        self._num_modules = min(num_tokens, len(model.draft_modules))
        drafting = model.config.layers[model.config.num_decoder_layers :]
        self._repeats = any(network.needs.redoes_drafts for layer in drafting for network in layer.networks)
        self._kept = KeptRows(self._num_modules - 1, num_tokens, num_slots) if self._num_modules > 1 else None

    def start(self, step: SampledStep, builder: StepBuilder) -> list[Tensor]:
        tokens_L = step.tokens_L
        if tokens_L is not None:
            tokens_L = self._model.groups.tp.broadcast(tokens_L, 0)  # collective: tp ranks
        sampling = [chunk for chunk in step.chunks if chunk.samples]
        rows = self._first_rows(step, tokens_L, sampling, builder)
        hidden_NSD, drafts = self._run(rows, self._num_modules)
        if len(drafts) == self._num_tokens or not any(step.num_sampling):
            return drafts
        positions = rows.inputs.positions.index_select(0, rows.rows_S).tolist()  # a GPU's host waits here
        return self._continue(step, sampling, positions, hidden_NSD, drafts, builder)

    def _first_rows(
        self, step: SampledStep, tokens_L: Tensor | None, sampling: Sequence[Chunk], builder: StepBuilder
    ) -> DraftRows:
        """Return the inputs of the modules for the rows of a step.

        The rows of a chunk come after the rows of earlier positions of its request that have to be computed again.
        """
        inputs, chunks, hidden_TD = step.inputs, step.chunks, step.hidden_TD
        if self._kept is not None:
            inputs, chunks, hidden_TD = self._kept.with_earlier_rows(step, builder)
        known = [
            [0] * self._num_modules if chunk.samples else _tokens_after(chunk, self._num_modules) for chunk in chunks
        ]
        later = [
            token_id
            for chunk, after in zip(chunks, known, strict=True)
            for token_id in (*chunk.token_ids[1:], after[0])
        ]
        later += [0] * (len(hidden_TD) - len(later))  # padding
        ends = np.cumsum([len(chunk.token_ids) for chunk in chunks], dtype=np.int64) - 1
        known_CN = np.array(known, np.int64).reshape(-1, self._num_modules)
        arrays = [np.array(later, np.int64), ends, known_CN[:, 1:].T.copy()]
        later_ids_T, ends_C, known_NC = builder.copies.upload(arrays)
        rows_S = inputs.logits_rows  # empty if no chunk samples
        if tokens_L is not None:
            later_ids_T.index_copy_(0, inputs.logits_rows, tokens_L)
            rows_S = rows_S.index_select(0, _last_rows(tokens_L, sampling, builder.copies))
        return DraftRows(
            inputs=inputs,
            hidden_TD=hidden_TD,
            later_ids_T=later_ids_T,
            rows_S=rows_S,
            ends_C=ends_C,
            known_NC=known_NC,
        )

    def _run(self, rows: DraftRows, num_modules: int) -> tuple[list[Tensor], list[Tensor]]:
        """Run the first modules. Collective: all ranks.

        Returns:
            For each module, the hidden states [S, D] and the drafted tokens [S] of the rows that draft.
        """
        hidden_TD, later_ids_T = rows.hidden_TD, rows.later_ids_T
        hidden_NSD: list[Tensor] = []
        drafts: list[Tensor] = []
        for number in range(num_modules):
            if number > 0:
                later_ids_T = later_ids_T.roll(-1)
                later_ids_T.index_copy_(0, rows.ends_C, rows.known_NC[number - 1])
                later_ids_T.index_copy_(0, rows.rows_S, drafts[-1])
            hidden_TD = self._model.draft(number, rows.inputs, later_ids_T, hidden_TD, self._caches)
            hidden_NSD.append(hidden_TD.index_select(0, rows.rows_S))
            drafts.append(self._choose(hidden_NSD[-1], number))
        return hidden_NSD, drafts

    def _continue(
        self,
        step: SampledStep,
        sampling: Sequence[Chunk],
        positions: Sequence[int],
        hidden_NSD: list[Tensor],
        drafts: list[Tensor],
        builder: StepBuilder,
    ) -> list[Tensor]:
        """Draft further tokens, and return all drafts [S]. Collective: all ranks, which run equally many modules.

        Args:
            positions: position of each chunk's row that drafts.
            hidden_NSD: hidden states of these rows after each module.
            drafts: tokens drafted from these hidden states.
        """
        count, num_first = self._num_modules, len(drafts)
        ends = [chunk.request.num_blocks * self._model.context.block_size for chunk in sampling]
        inputs_of_rows: tuple[list[Tensor], list[Tensor]] = [], []
        last_N = drafts
        for first in range(num_first, self._num_tokens, count):
            inputs_of_rows = inputs_of_rows[0] + hidden_NSD, inputs_of_rows[1] + last_N
            length = first if self._repeats else count
            starts = [position + 1 + first - length for position in positions]
            chunks = [
                Chunk(
                    chunk.slot,
                    max(0, min(start, end - length)),
                    [0] * length,
                    chunk.request,
                    samples=False,
                    prompt_targets=(),
                    drafts=[0] * length,
                )
                for chunk, start, end in zip(sampling, starts, ends, strict=True)
            ]
            inputs = builder.build_inputs(chunks, tuple(length * number for number in step.num_sampling))
            lacks_block = [start + length > end for start, end in zip(starts, ends, strict=True)]
            if any(lacks_block):
                (lacks_block_S,) = builder.copies.upload([np.array(lacks_block, np.bool_)])
                inputs = _without_cache(inputs, lacks_block_S.repeat_interleave(length))
            ends_S = torch.arange(1, len(sampling) + 1, device=hidden_NSD[0].device) * length - 1
            rows = DraftRows(
                inputs=inputs,
                hidden_TD=torch.stack(inputs_of_rows[0][-length:], dim=1).flatten(0, 1),
                later_ids_T=torch.stack(inputs_of_rows[1][-length:], dim=1).flatten(),
                rows_S=ends_S,
                ends_C=ends_S,
                known_NC=torch.zeros(count - 1, len(sampling), dtype=torch.int64, device=ends_S.device),
            )
            hidden_NSD, last_N = self._run(rows, min(count, self._num_tokens - first))
            drafts = drafts + [
                ids_S.masked_fill(lacks_block_S, NO_DRAFT) if any(lacks_block) else ids_S for ids_S in last_N
            ]
        return drafts

    def _choose(self, hidden_SD: Tensor, number: int) -> Tensor:
        """Return [S] int64: the most likely token of each row of a module. Collective: tp ranks."""
        if not len(hidden_SD):
            return torch.zeros(0, dtype=torch.int64, device=hidden_SD.device)
        return self._model.logits(hidden_SD, number).argmax(dim=-1)

    def propose(
        self, request: RequestState, new_token_ids: Sequence[int], index: int, on_host: Sequence[Tensor]
    ) -> list[int]:
        return list(itertools.takewhile(lambda token_id: token_id != NO_DRAFT, (int(each[index]) for each in on_host)))


class KeptRows:
    """The model's hidden states at the last positions of each request, from which MTP modules run again."""

    def __init__(self, num_rows: int, num_drafts: int, num_slots: int) -> None:
        """
        Args:
            num_rows: number of rows to compute again before a chunk.
            num_drafts: maximum number of drafts at the end of a chunk. If all are rejected, the next chunk begins at
                the position of the first draft.
        """
        self._num_rows = num_rows
        self._num_kept = num_rows + 1 + num_drafts
        self._num_slots = num_slots
        # The place of a position among a request's rows is the remainder. Allocated in the first step, whose memory is
        # measured.
        self._hidden_KD: Tensor | None = None

    def with_earlier_rows(self, step: SampledStep, builder: StepBuilder) -> tuple[StepInputs, list[Chunk], Tensor]:
        """Return the step with the rows before each chunk that samples, and keep the last rows of all chunks.

        Other chunks need no earlier rows, because the modules have read the right tokens at all positions before them.
        All ranks must know the number of rows, so unused rows are added if fewer earlier rows of a request are kept.
        """
        chunks: list[Chunk] = []
        unused: list[bool] = []  # for each chunk, True if its row is unused
        of_step: list[int] = []  # rows of the step
        earlier: list[int] = []  # rows of earlier positions
        loaded: list[int] = []  # places of the earlier rows among the kept rows
        kept: list[int] = []  # rows of the step that are kept
        stored: list[int] = []  # places where these rows are kept
        row = first_row = 0
        for chunk in step.chunks:
            if chunk.request.first_computed is None:
                chunk.request.first_computed = chunk.start
            first, num_tokens = chunk.slot * self._num_kept, len(chunk.token_ids)
            num_before = min(self._num_rows, chunk.start - chunk.request.first_computed) if chunk.samples else 0
            before = range(chunk.start - num_before, chunk.start)
            token_ids = [*chunk.request.token_ids[before.start : before.stop], *chunk.token_ids]
            chunks.append(chunk._replace(start=before.start, token_ids=token_ids))
            unused.append(False)
            earlier += range(row, row + num_before)
            loaded += (first + position % self._num_kept for position in before)
            of_step += range(row + num_before, row + num_before + num_tokens)
            num_kept = min(num_tokens, self._num_kept)
            kept += range(first_row + num_tokens - num_kept, first_row + num_tokens)
            stored += (first + position % self._num_kept for position in range(chunk.end - num_kept, chunk.end))
            row, first_row = row + num_before + num_tokens, first_row + num_tokens
            if chunk.samples:
                num_unused = self._num_rows - num_before
                chunks += [
                    Chunk(chunk.slot, chunk.start, [0], chunk.request, samples=False, prompt_targets=())
                ] * num_unused
                unused += [True] * num_unused
                row += num_unused
        num_tokens_of = tuple(
            tokens + self._num_rows * count for tokens, count in zip(step.num_tokens, step.num_sampling, strict=True)
        )
        inputs = builder.build_inputs(chunks, num_tokens_of)
        lengths = [len(chunk.token_ids) for chunk in chunks]
        arrays = [np.array(each, np.int64) for each in (of_step, earlier, loaded, kept, stored)]
        is_unused = np.repeat(np.array(unused, np.bool_), lengths)
        *on_device, is_unused_T = builder.copies.upload([*arrays, is_unused])
        of_step_T, earlier_E, loaded_E, kept_K, stored_K = on_device
        if self._hidden_KD is None:
            self._hidden_KD = step.hidden_TD.new_zeros(self._num_slots * self._num_kept, step.hidden_TD.shape[1])
        hidden_TD = step.hidden_TD.new_zeros(row, step.hidden_TD.shape[1])
        hidden_TD.index_copy_(0, of_step_T, step.hidden_TD[: len(of_step)])
        hidden_TD.index_copy_(0, earlier_E, self._hidden_KD.index_select(0, loaded_E))
        self._hidden_KD.index_copy_(0, stored_K, step.hidden_TD.index_select(0, kept_K))
        return _without_cache(inputs, is_unused_T) if any(unused) else inputs, chunks, hidden_TD


def drafter_of(config: EngineConfig, model: RankModel, caches: list[Any]) -> Drafter | None:
    """Return the drafter of this rank; None without speculative decoding."""
    speculation = config.schedule.speculative_config
    if speculation is None:
        return None
    if not config.schedule.num_mtp_drafts:
        return NgramDrafter(speculation)
    assert isinstance(model, Decoder), "other models have no modules for drafts"
    return ModuleDrafter(
        model,
        caches,
        num_tokens=config.schedule.num_mtp_drafts,
        num_slots=config.schedule.max_num_seqs,
    )


def _tokens_after(chunk: Chunk, count: int) -> list[int]:
    """Return the tokens after a chunk that does not sample, with zeros for unknown tokens."""
    after = chunk.request.token_ids[chunk.end : chunk.end + count]
    return after + [0] * (count - len(after))


def _without_cache(step: StepInputs, is_without_T: Tensor) -> StepInputs:
    """Return the step without cache slots for the given rows, so that their keys and values are not stored."""

    def without(cache_slots: Tensor) -> Tensor:
        return cache_slots.masked_fill(is_without_T, -1)

    others = tuple(table._replace(cache_slots=without(table.cache_slots)) for table in step.other_tables)
    return dataclasses.replace(step, cache_slots=without(step.cache_slots), other_tables=others)


def _last_rows(tokens_L: Tensor, sampling: Sequence[Chunk], copies: DeviceCopies) -> Tensor:
    """Return the index [S] of the sampled row after the last accepted draft of each chunk.

    Args:
        tokens_L: tokens sampled from all rows.
        sampling: the chunks that sample.
    """
    counts = [chunk.num_sampled for chunk in sampling]
    drafted = [token_id for chunk in sampling for token_id in (*chunk.drafts, NO_DRAFT)]
    arrays = np.array(drafted, np.int64), np.repeat(np.arange(len(counts)), counts), np.cumsum(counts) - 1
    drafted_L, chunk_of_row_L, last_S = copies.upload(arrays)
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
