"""Builds the tensors of a step from its plan, runs the model, and samples tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.distributed.mesh import share_of, share_sizes
from moeserve.errors import EngineError
from moeserve.models.decoder import Decoder
from moeserve.protocol import Chunk, ChunkResult, StepPlan, StepResult, TokenLogprobs
from moeserve.step_inputs import ChunkSpan, StepInputs
from moeserve.worker.sampler import prompt_logprobs, sample
from moeserve.worker.step_replay import StepContext, StepReplay

# Rows of prompt log-probabilities computed at once: a long prompt times a vocabulary would not fit.
PROMPT_ROWS = 64


class ModelRunner:
    """Executes plans on one rank. The first tp rank of a replica samples."""

    def __init__(self, model: Decoder, context: StepContext, replay: StepReplay) -> None:
        self.model = model
        self.context = context
        self.replay = replay

    @torch.inference_mode()
    def execute(self, plan: StepPlan, num_tokens: tuple[int, ...], padded_to: int | None = None) -> StepResult:
        """Run one step. Collective: all ranks.

        Args:
            num_tokens: of each replica's plan for this step, in order of dp rank.
            padded_to: rows to which all replicas pad a decode step; None: no padding.

        Raises:
            EngineError: the logits are not finite. This rank has then entered all collectives of the step.
        """
        step = self.build_inputs(plan, num_tokens, padded_to)
        hidden_TD = self.replay(step)
        if self.context.tp_rank != 0:
            self._join_logits(plan, step, hidden_TD)
            return StepResult(step=plan.step, chunks=[])

        kernels = self.model.context.kernels
        # Computing logits is collective, so all of them are computed before any error is raised.
        specs = [chunk.sample for chunk in plan.chunks if chunk.sample is not None]
        logits_LV = self.model.logits(step.rows_for_logits(hidden_TD)) if specs else None
        failure: EngineError | None = None
        prompts: list[list[TokenLogprobs]] = []
        for chunk, span in zip(plan.chunks, step.spans[: len(plan.chunks)], strict=True):
            prompts.append([])
            for first, targets in _prompt_pieces(chunk):
                rows_RV = self.model.logits(hidden_TD[span.first_row + first :][: len(targets)])
                try:
                    prompts[-1] += prompt_logprobs(rows_RV, targets, chunk.num_prompt_logprobs or 0, kernels)
                except EngineError as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        sampled = iter([] if logits_LV is None else sample(logits_LV, specs, kernels))
        self.model.groups.raise_failure()  # the tokens are on the host, so the GPU has finished the step
        results = []
        for chunk, prompt in zip(plan.chunks, prompts, strict=True):
            if chunk.sample is None:
                results.append(ChunkResult(prompt_logprobs=prompt))
            else:
                token = next(sampled)
                results.append(ChunkResult(token_id=token.token_id, logprobs=token.logprobs, prompt_logprobs=prompt))
        return StepResult(step=plan.step, chunks=results)

    def build_inputs(self, plan: StepPlan, num_tokens: tuple[int, ...], padded_to: int | None = None) -> StepInputs:
        """Return a plan as tensors on the device. See `execute`."""
        size, mesh = self.context.block_size, self.context.mesh
        token_ids: list[int] = []
        positions: list[int] = []
        cache_slots: list[int] = []
        logits_rows: list[int] = []
        spans: list[ChunkSpan] = []
        for chunk in plan.chunks:
            span = ChunkSpan(
                first_row=len(token_ids),
                num_rows=len(chunk.token_ids),
                context_len=chunk.start + len(chunk.token_ids),
            )
            spans.append(span)
            token_ids += chunk.token_ids
            positions += range(chunk.start, span.context_len)
            cache_slots += [
                chunk.block_ids[position // size] * size + position % size
                for position in range(chunk.start, span.context_len)
            ]
            if chunk.sample is not None:
                logits_rows.append(len(token_ids) - 1)
        max_blocks = max((len(chunk.block_ids) for chunk in plan.chunks), default=0)
        block_table = [chunk.block_ids + [0] * (max_blocks - len(chunk.block_ids)) for chunk in plan.chunks]
        step = StepInputs(
            token_ids=self._tensor(token_ids, torch.int64),
            positions=self._tensor(positions, torch.int64),
            cache_slots=self._tensor(cache_slots, torch.int64),
            row_starts=self._tensor([*(span.first_row for span in spans), len(token_ids)], torch.int32),
            context_lens=self._tensor([span.context_len for span in spans], torch.int32),
            block_table=self._tensor(block_table, torch.int32).view(len(spans), max_blocks),
            logits_rows=self._tensor(logits_rows, torch.int64),
            spans=tuple(spans),
            tp_sizes=share_sizes(len(token_ids), mesh.tp),
            tokens_per_rank=tuple(size for count in num_tokens for size in share_sizes(count, mesh.tp)),
            own_rows=share_of(len(token_ids), self.context.tp_rank, mesh.tp),
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

    def _join_logits(self, plan: StepPlan, step: StepInputs, hidden_TD: Tensor) -> None:
        """Compute this rank's part of the logits that the sampling rank computes, in the same order."""
        if any(chunk.sample is not None for chunk in plan.chunks):
            self.model.logits(step.rows_for_logits(hidden_TD))
        for chunk, span in zip(plan.chunks, step.spans[: len(plan.chunks)], strict=True):
            for first, targets in _prompt_pieces(chunk):
                self.model.logits(hidden_TD[span.first_row + first :][: len(targets)])

    def _tensor(self, numbers: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(self.context.device, non_blocking=True)


def _prompt_pieces(chunk: Chunk) -> Iterator[tuple[int, list[int]]]:
    """Yield pieces of the prompt tokens that need log-probabilities, each with its first row."""
    if chunk.num_prompt_logprobs is not None:
        for first in range(0, len(chunk.prompt_targets), PROMPT_ROWS):
            yield first, chunk.prompt_targets[first : first + PROMPT_ROWS]
