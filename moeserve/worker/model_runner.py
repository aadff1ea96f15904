"""Builds the tensors of a step from its chunks, runs the model, and samples tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moeserve.distributed.mesh import share_of, share_sizes
from moeserve.errors import EngineError, MoeserveError
from moeserve.models.decoder import Decoder
from moeserve.protocol import ChunkResult, LogprobRows
from moeserve.step_inputs import ChunkSpan, StepInputs
from moeserve.worker.grammars import AllowedTokens, Grammars
from moeserve.worker.request_table import Chunk, RequestState, RequestTable
from moeserve.worker.sampler import CAUSE_OF_DAMAGE, SampledToken, prompt_logprobs, sample, sample_spec
from moeserve.worker.step_replay import StepContext, StepReplay

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

    @torch.inference_mode()
    def execute(
        self, chunks: Sequence[Chunk], num_tokens: tuple[int, ...], padded_to: int | None = None
    ) -> list[ChunkResult]:
        """Run one step. Collective: all ranks.

        Args:
            num_tokens: of each replica's chunks in this step, in order of dp rank.
            padded_to: rows to which all replicas pad a decode step; None: no padding.

        Returns:
            The results on the rank that samples; nothing on the others.
        """
        step = self.build_inputs(chunks, num_tokens, padded_to)
        hidden_TD = self.replay(step)
        if self.model.head is None:  # a later pipeline stage samples
            return []
        # Computing logits is collective: on all tp ranks alike.
        sampling = [chunk for chunk in chunks if chunk.samples]
        logits_LV = self.model.logits(step.rows_for_logits(hidden_TD)) if sampling else None
        samples_here = self.context.tp_rank == 0
        chunks_and_spans = list(zip(chunks, step.spans[: len(chunks)], strict=True))
        prompts = [
            list(self._prompt_rows(chunk, hidden_TD[span.first_row :], samples_here))
            for chunk, span in chunks_and_spans
        ]
        sampled: list[SampledToken] = []
        if samples_here and logits_LV is not None:
            # A GPU computes the logits meanwhile.
            specs = [sample_spec(chunk.request, self._allowed_tokens(chunk.request)) for chunk in sampling]
            sampled = sample(logits_LV, specs, self.model.context.kernels)
        self.model.groups.raise_failure()  # the tokens are on the host, so the GPU has finished the step
        if self.appends_samples and sampling:
            self._append_tokens(chunks, [token.token_id for token in sampled] or [0] * len(sampling))
        if not samples_here:
            return []
        damaged = _damaged_rows(hidden_TD, [span.last_row for chunk, span in chunks_and_spans if not chunk.samples])
        remaining = iter(sampled)
        return [
            _chunk_result(next(remaining) if chunk.samples else None, prompt, span.last_row in damaged)
            for (chunk, span), prompt in zip(chunks_and_spans, prompts, strict=True)
        ]

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

    def _append_tokens(self, chunks: Sequence[Chunk], token_ids: list[int]) -> None:
        """Append the tokens of the first tp rank on all of them."""
        # collective: tp ranks
        shared = self.model.groups.tp.broadcast(torch.tensor(token_ids), 0)
        self.table.append_tokens(chunks, token_ids if self.context.tp_rank == 0 else shared.tolist())

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
        """Return chunks as tensors on the device. See `execute`."""
        mesh, block_size = self.context.mesh, self.context.block_size
        lengths = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
        row_starts = np.concatenate([[0], np.cumsum(lengths)])
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        slots = np.array([chunk.slot for chunk in chunks], np.int64)
        total = int(row_starts[-1])
        positions = np.arange(total) + np.repeat(starts - row_starts[:-1], lengths)
        blocks = self.table.block_table[np.repeat(slots, lengths), positions // block_size]
        max_blocks = max((-(-chunk.end // block_size) for chunk in chunks), default=0)
        spans = tuple(
            ChunkSpan(first_row=first_row, num_rows=len(chunk.token_ids), context_len=chunk.end)
            for first_row, chunk in zip(row_starts.tolist(), chunks, strict=False)
        )
        step = StepInputs(
            token_ids=self._tensor([token_id for chunk in chunks for token_id in chunk.token_ids], np.int64),
            positions=self._tensor(positions, np.int64),
            cache_slots=self._tensor(blocks.astype(np.int64) * block_size + positions % block_size, np.int64),
            row_starts=self._tensor(row_starts, np.int32),
            context_lens=self._tensor(starts + lengths, np.int32),
            block_table=self._tensor(self.table.block_table[slots, :max_blocks], np.int32),
            logits_rows=self._tensor(
                [span.last_row for chunk, span in zip(chunks, spans, strict=True) if chunk.samples], np.int64
            ),
            spans=spans,
            tp_sizes=share_sizes(total, mesh.tp),
            tokens_per_rank=tuple(size for count in num_tokens for size in share_sizes(count, mesh.tp)),
            own_rows=share_of(total, self.context.tp_rank, mesh.tp),
        )
        return step if padded_to is None else self._pad(step, padded_to)

    def _pad(self, step: StepInputs, size: int) -> StepInputs:
        """Return a decode step with padding rows at its end."""
        num_tokens, num_missing = len(step.token_ids), size - len(step.token_ids)
        assert len(step.spans) == num_tokens <= size, (len(step.spans), num_tokens, size)
        mesh = self.context.mesh
        tp_sizes = share_sizes(size, mesh.tp)
        rows = torch.arange(size + 1, dtype=torch.int32, device=self.context.device)
        return StepInputs(
            token_ids=functional.pad(step.token_ids, (0, num_missing)),
            positions=functional.pad(step.positions, (0, num_missing)),
            cache_slots=functional.pad(step.cache_slots, (0, num_missing), value=-1),
            row_starts=rows,
            context_lens=functional.pad(step.context_lens, (0, num_missing)),
            block_table=functional.pad(step.block_table, (0, 0, 0, num_missing)),
            logits_rows=step.logits_rows,
            spans=step.spans + tuple(ChunkSpan(row, 1, 0) for row in range(num_tokens, size)),
            tp_sizes=tp_sizes,
            tokens_per_rank=tp_sizes * mesh.dp,
            padding=rows[:size] >= num_tokens,
            own_rows=share_of(size, self.context.tp_rank, mesh.tp),
        )

    def _tensor(self, numbers: Any, dtype: Any) -> Tensor:
        return torch.from_numpy(np.asarray(numbers, dtype)).to(self.context.device, non_blocking=True)


def _damaged_rows(hidden_TD: Tensor, rows: list[int]) -> set[int]:
    """Return which of these rows contain NaN or infinity."""
    if not rows:
        return set()
    is_finite_R = hidden_TD[rows].isfinite().all(dim=1)
    return {row for row, is_finite in zip(rows, is_finite_R.tolist(), strict=True) if not is_finite}


def _chunk_result(token: SampledToken | None, prompt: list[LogprobRows | str], is_damaged: bool) -> ChunkResult:
    """Return the result of one chunk.

    Args:
        is_damaged: its last row is not finite though nothing is sampled from it. Keys and values of the chunk may be
            damaged too, and must not get into the prefix cache.
    """
    errors = [piece for piece in prompt if isinstance(piece, str)]
    if is_damaged:
        errors.append("the model produced NaN or infinite hidden states; " + CAUSE_OF_DAMAGE)
    if token is not None and token.error is not None:
        errors.append(token.error)
    if errors:
        return ChunkResult(error=errors[0])
    rows = [piece for piece in prompt if isinstance(piece, LogprobRows)]
    if token is None:
        return ChunkResult(prompt_logprobs=rows)
    return ChunkResult(token_id=token.token_id, logprobs=token.logprobs, prompt_logprobs=rows)
