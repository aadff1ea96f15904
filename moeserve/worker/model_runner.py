"""Builds the tensors of a step from its chunks, runs the model, and samples tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.distributed.mesh import share_of, share_sizes
from moeserve.errors import EngineError, MoeserveError
from moeserve.models.decoder import Decoder
from moeserve.protocol import ChunkResult, LogprobRows
from moeserve.step_inputs import ChunkSpan, StepInputs
from moeserve.worker.grammars import AllowedTokens, Grammars
from moeserve.worker.halves import in_halves
from moeserve.worker.request_table import UNKNOWN_TOKEN, Chunk, RequestState, RequestTable
from moeserve.worker.sampler import (
    Maxima,
    SampledToken,
    needs_logits_only,
    prompt_logprobs,
    sample,
    sample_spec,
    with_random_tokens,
)
from moeserve.worker.started_step import StartedStep
from moeserve.worker.step_memory import Array, HostInputs, memory_of
from moeserve.worker.step_replay import StepContext, StepOutputs, StepReplay

# Rows of prompt log-probabilities computed at once: a long prompt times a vocabulary would not fit.
PROMPT_ROWS = 64


class ModelRunner:
    """Executes steps on one rank. The first tp rank of a replica's last pipeline stage samples."""

    def __init__(
        self,
        model: Decoder,
        context: StepContext,
        replay: StepReplay,
        table: RequestTable,
        *,
        appends_samples: bool = True,
        grammars: Grammars | None = None,
    ) -> None:
        """
        Args:
            table: of the requests whose chunks are executed.
            appends_samples: append sampled tokens to the table, for later plans that do not bring them.
            grammars: for requests that have one; None: none has.
        """
        self.model = model
        self.context = context
        self.replay = replay
        self.table = table
        self.appends_samples = appends_samples
        self.grammars = grammars
        self.memory = memory_of(table, context.device)
        self._previous: StartedStep | None = None  # the last step, on a device that may still compute it

    @torch.inference_mode()
    def start(
        self,
        chunks: Sequence[Chunk],
        num_tokens: tuple[int, ...],
        padded_to: int | None = None,
        *,
        has_halves: bool = False,
    ) -> StartedStep:
        """Start one step, without waiting for the device where its tokens allow that. Collective: all ranks.

        The step before it may still run, but not the one before that: `StartedStep.finish` has returned.

        Args:
            num_tokens: of each replica's chunks in this step, in order of dp rank.
            padded_to: rows to which all replicas pad a decode step; None: no padding.
            has_halves: run the step in halves. Captured steps have their own.
        """
        step = self.build_inputs(chunks, num_tokens, padded_to)
        if has_halves:
            step = in_halves(step, tp=self.context.mesh.tp, tp_rank=self.context.tp_rank)
        outputs = self.replay(step)
        if self.model.head is None:  # a later pipeline stage samples
            return StartedStep(
                chunks=[],
                prompts=[],
                sampled=[],
                reading=self.memory.start_reading([torch.zeros(0)]),
                places=[],
                logits_dtype=torch.float32,
                raise_failure=self.model.groups.raise_failure,
            )
        # Computing logits is collective: on all tp ranks alike.
        sampling = [chunk for chunk in chunks if chunk.samples]
        samples_here = self.context.tp_rank == 0
        logits_LV, maxima_L = self._logits(outputs, step, len(chunks)) if sampling else (None, None)
        prompts = [
            list(self._prompt_rows(chunk, outputs.hidden_TD[span.first_row :], samples_here))
            if chunk.prompt_targets
            else []
            for chunk, span in zip(chunks, step.spans, strict=False)
        ]
        is_finite = torch.zeros(0)
        if len(sampling) < len(chunks):
            last_rows_SD = outputs.hidden_TD.index_select(0, step.row_starts[1:] - 1)
            is_finite = last_rows_SD.isfinite().all(dim=1)
        sampled: list[SampledToken] | None = []
        chosen: tuple[Tensor, Tensor] | tuple[()] = ()
        if logits_LV is not None and self._samples_on_device(sampling):
            sampled, chosen = None, self._choose_on_device(logits_LV, maxima_L, sampling)
        elif logits_LV is not None:
            self._finish_previous()  # for penalties and grammars
            if samples_here:
                # A GPU computes the logits meanwhile.
                specs = [sample_spec(chunk.request, self._allowed_tokens(chunk.request)) for chunk in sampling]
                sampled = sample(logits_LV, specs, self.model.context.kernels, maxima_L)
            self.model.groups.raise_failure()  # the tokens are on the host, so the GPU has finished the step
            if self.appends_samples:
                self._append(sampling, [token.token_id for token in sampled or []] or [0] * len(sampling))
        reading = self.memory.start_reading([is_finite, *chosen])
        started = StartedStep(
            chunks=chunks if samples_here else [],
            prompts=prompts,
            sampled=sampled,
            reading=reading,
            places=self._append_unknown(sampling, chosen[0]) if chosen else [],
            logits_dtype=torch.float32 if logits_LV is None else logits_LV.dtype,
            raise_failure=self.model.groups.raise_failure,
        )
        if sampling and not chosen:
            started.finish()  # the device has nothing left to do
        self._previous = started if self.memory.is_asynchronous else None
        return started

    def execute(
        self, chunks: Sequence[Chunk], num_tokens: tuple[int, ...], padded_to: int | None = None
    ) -> list[ChunkResult]:
        """Run one step to its end. Collective: all ranks. See `start`."""
        return self.start(chunks, num_tokens, padded_to).finish()

    def skip(self, chunks: Sequence[Chunk]) -> None:
        """Make later plans possible after a step that has failed, on a rank without others."""
        if self.appends_samples:
            self.table.append_tokens(chunks, [0] * sum(chunk.samples for chunk in chunks))

    def _allowed_tokens(self, request: RequestState) -> AllowedTokens | None:
        """Return the tokens that the grammar of a request allows next; None if it has none."""
        if request.params.grammar is None:
            return None
        assert self.grammars is not None, "there is no tokenizer for grammars"
        try:
            request.matcher = request.matcher or self.grammars.matcher(request.params.grammar)
        except MoeserveError as error:  # where requests are submitted, it compiled
            return AllowedTokens(np.zeros(0, np.uint8), str(error))
        return request.matcher.allowed_tokens(request.token_ids[request.num_prompt_tokens :], request.end_token_ids)

    def _logits(self, outputs: StepOutputs, step: StepInputs, num_chunks: int) -> tuple[Tensor, Maxima | None]:
        """Return the logits of the rows that are sampled, and their maxima if they are known. Collective: tp ranks."""
        if outputs.logits_TV is None:
            return self.model.logits(step.rows_for_logits(outputs.hidden_TD)), None
        assert outputs.maxima_T is not None

        def rows_of(x: Tensor) -> Tensor:  # in a padded decode step, mostly all rows but the padding
            return x[:num_chunks] if len(step.logits_rows) == num_chunks else x[step.logits_rows]

        highest_T, most_likely_T = outputs.maxima_T
        return rows_of(outputs.logits_TV), (rows_of(highest_T), rows_of(most_likely_T))

    def _samples_on_device(self, sampling: Sequence[Chunk]) -> bool:
        """Return True if no row needs the host. All tp ranks return the same."""
        can_draw = self.model.context.kernels.draw_tokens is not None
        return self.memory.is_asynchronous and all(
            needs_logits_only(chunk.request) and (can_draw or chunk.request.params.temperature == 0)
            for chunk in sampling
        )

    def _choose_on_device(
        self, logits_LV: Tensor, maxima_L: Maxima | None, sampling: Sequence[Chunk]
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens of the first tp rank [L], and the highest logits [L]."""
        kernels = self.model.context.kernels
        highest_L, tokens_L = maxima_L or kernels.row_maximum(logits_LV)
        if self.context.tp_rank == 0:
            requests = [chunk.request for chunk in sampling]
            tokens_L = with_random_tokens(tokens_L, logits_LV, requests, kernels, self.memory.upload)
        return self.model.groups.tp.broadcast(tokens_L, 0), highest_L  # collective: tp ranks

    def _append_unknown(self, sampling: Sequence[Chunk], tokens_L: Tensor) -> list[tuple[RequestState, int]]:
        """Append tokens that the host does not know yet. Return their places."""
        if not self.appends_samples:
            return []
        self.memory.keep_tokens(sampling, tokens_L)
        self.table.append_tokens(sampling, [UNKNOWN_TOKEN] * len(sampling))
        return [(chunk.request, len(chunk.request.token_ids) - 1) for chunk in sampling]

    def _append(self, sampling: Sequence[Chunk], token_ids: list[int]) -> None:
        """Append the tokens of the first tp rank on all of them."""
        # collective: tp ranks
        shared = self.model.groups.tp.broadcast(torch.tensor(token_ids), 0)
        self.table.append_tokens(sampling, token_ids if self.context.tp_rank == 0 else shared.tolist())

    def _finish_previous(self) -> None:
        if self._previous is not None:
            self._previous.finish()
            self.replay.on_layers()  # whoever waits for its results need not wait for this step

    def _prompt_rows(self, chunk: Chunk, hidden_TD: Tensor, samples_here: bool) -> Iterator[LogprobRows | str]:
        """Yield log-probabilities of pieces of the prompt, or an error. Collective: tp ranks, in their logits."""
        for first in range(0, len(chunk.prompt_targets), PROMPT_ROWS):
            targets = chunk.prompt_targets[first : first + PROMPT_ROWS]
            rows_RV = self.model.logits(hidden_TD[first:][: len(targets)])
            if not samples_here:
                continue
            try:
                yield prompt_logprobs(
                    rows_RV, targets, chunk.request.params.prompt_logprobs or 0, self.model.context.kernels
                )
            except EngineError as error:
                yield str(error)

    def build_inputs(
        self, chunks: Sequence[Chunk], num_tokens: tuple[int, ...], padded_to: int | None = None
    ) -> StepInputs:
        """Return chunks as tensors on the device. See `start`."""
        mesh, block_size = self.context.mesh, self.context.block_size
        lengths = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
        row_starts = np.concatenate([[0], np.cumsum(lengths)])
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        slots = np.array([chunk.slot for chunk in chunks], np.int64)
        total = int(row_starts[-1])
        size = total if padded_to is None else padded_to
        num_padding = size - total
        assert num_padding == 0 or len(chunks) == total < size, "only decode steps are padded"
        positions = np.arange(total) + np.repeat(starts - row_starts[:-1], lengths)
        blocks = self.table.block_table[np.repeat(slots, lengths), positions // block_size]
        cache_slots = blocks.astype(np.int64) * block_size + positions % block_size
        max_blocks = max((-(-chunk.end // block_size) for chunk in chunks), default=0)
        spans = tuple(
            ChunkSpan(first_row=first_row, num_rows=len(chunk.token_ids), context_len=chunk.end)
            for first_row, chunk in zip(row_starts.tolist(), chunks, strict=False)
        )
        logits_rows = [span.last_row for chunk, span in zip(chunks, spans, strict=True) if chunk.samples]
        inputs = HostInputs(
            token_ids=_padded([token for chunk in chunks for token in chunk.token_ids], np.int64, num_padding),
            positions=_padded(positions, np.int64, num_padding),
            cache_slots=_padded(cache_slots, np.int64, num_padding, -1),
            row_starts=np.concatenate([row_starts, np.arange(total + 1, size + 1)]).astype(np.int32),
            context_lens=_padded(starts + lengths, np.int32, num_padding),
            logits_rows=np.array(logits_rows, np.int64),
            padding=_padded(np.zeros(total, np.bool_), np.bool_, num_padding, True),
        )
        tensors, block_table = self.memory.upload_step(inputs, chunks, max_blocks)
        on_device: dict[str, Any] = dict(zip(HostInputs.names(), tensors, strict=True))
        padding = on_device.pop("padding")
        counts = num_tokens if padded_to is None else (size,) * mesh.dp
        return StepInputs(
            **on_device,
            block_table=block_table,
            spans=spans + tuple(ChunkSpan(row, 1, 0) for row in range(total, size)),
            tp_sizes=share_sizes(size, mesh.tp),
            tokens_per_rank=tuple(share for count in counts for share in share_sizes(count, mesh.tp)),
            padding=None if padded_to is None else padding,
            own_rows=share_of(size, self.context.tp_rank, mesh.tp),
        )


def _padded(numbers: Any, dtype: Any, num_padding: int, value: int = 0) -> Array:
    array = np.asarray(numbers, dtype)
    return np.pad(array, (0, num_padding), constant_values=value) if num_padding else array
