"""Turns a plan into tensors, runs the model on them, and turns what it gave into a result."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moeserve.messages import ChunkResult, StepPlan, StepResult, TokenLogprobs
from moeserve.models.decoder import Decoder
from moeserve.step_inputs import ChunkSpan, StepInputs
from moeserve.worker.sampler import prompt_logprobs, sample

# Rows of prompt log-probabilities computed at once: a long prompt times a vocabulary would not fit.
PROMPT_ROWS = 64


class ModelRunner:
    """A model, and the caches that its attention layers write to and read from."""

    def __init__(self, model: Decoder, caches: list[Any], block_size: int, device: str) -> None:
        self.model = model
        self.caches = caches
        self.block_size = block_size
        self.device = torch.device(device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step: every chunk's keys and values into the cache, and the tokens that were asked for."""
        step = self.build_inputs(plan)
        hidden_TD = self.model(step, self.caches)

        specs = [chunk.sample for chunk in plan.chunks if chunk.sample is not None]
        sampled = iter(sample(self.model.logits(hidden_TD[step.logits_rows]), specs) if specs else [])
        results = []
        for chunk, span in zip(plan.chunks, step.spans, strict=True):
            prompt = self._prompt_logprobs(hidden_TD[span.first_row :], chunk.prompt_targets, chunk.num_prompt_logprobs)
            if chunk.sample is None:
                results.append(ChunkResult(prompt_logprobs=prompt))
            else:
                token = next(sampled)
                results.append(ChunkResult(token_id=token.token_id, logprobs=token.logprobs, prompt_logprobs=prompt))
        return StepResult(step=plan.step, chunks=results)

    def build_inputs(self, plan: StepPlan) -> StepInputs:
        """A plan as tensors on the device."""
        lengths = [len(chunk.token_ids) for chunk in plan.chunks]
        row_starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
        token_ids = np.fromiter((token for chunk in plan.chunks for token in chunk.token_ids), np.int64, sum(lengths))
        starts = np.array([chunk.start for chunk in plan.chunks], np.int64)
        # Counts up within each chunk: the row's place in the step, less the place of its chunk, plus the chunk's start.
        positions = np.arange(sum(lengths)) + np.repeat(starts - row_starts[:-1], lengths)
        block_table = np.zeros((len(plan.chunks), max((len(c.block_ids) for c in plan.chunks), default=0)), np.int32)
        for row, chunk in enumerate(plan.chunks):
            block_table[row, : len(chunk.block_ids)] = chunk.block_ids
        chunk_of_token = np.repeat(np.arange(len(plan.chunks)), lengths)
        blocks = block_table[chunk_of_token, positions // self.block_size].astype(np.int64)
        sampled = np.array([c.sample is not None for c in plan.chunks], bool)
        spans = tuple(
            ChunkSpan(first_row=int(first), num_rows=length, context_len=chunk.start + length)
            for first, length, chunk in zip(row_starts, lengths, plan.chunks, strict=False)
        )
        return StepInputs(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            cache_slots=self._tensor(blocks * self.block_size + positions % self.block_size),
            row_starts=self._tensor(row_starts),
            context_lens=self._tensor(np.array([span.context_len for span in spans], np.int32)),
            block_table=self._tensor(block_table),
            logits_rows=self._tensor(row_starts[1:][sampled].astype(np.int64) - 1),
            spans=spans,
        )

    def _prompt_logprobs(self, hidden_RD: torch.Tensor, targets: list[int], num_top: int | None) -> list[TokenLogprobs]:
        if num_top is None:
            return []
        found: list[TokenLogprobs] = []
        for first in range(0, len(targets), PROMPT_ROWS):
            piece = targets[first : first + PROMPT_ROWS]
            found += prompt_logprobs(self.model.logits(hidden_RD[first : first + len(piece)]), piece, num_top)
        return found

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
