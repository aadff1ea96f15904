"""Turns a plan into tensors, runs the model on them, and turns what it gave into a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from moeserve.distributed.mesh import Mesh, share_sizes
from moeserve.errors import EngineError
from moeserve.messages import Chunk, ChunkResult, StepPlan, StepResult, TokenLogprobs
from moeserve.models.decoder import Decoder
from moeserve.step_inputs import ChunkSpan, StepInputs
from moeserve.worker.sampler import prompt_logprobs, sample

# Rows of prompt log-probabilities computed at once: a long prompt times a vocabulary would not fit.
PROMPT_ROWS = 64


class ModelRunner:
    """One rank's part of a model, and the caches that its attention layers write to and read from."""

    def __init__(
        self, model: Decoder, caches: list[Any], mesh: Mesh, block_size: int, device: str, *, samples: bool = True
    ) -> None:
        """
        Args:
            samples: whether this rank chooses the tokens; one rank of a replica does.
        """
        self.samples = samples
        self.model = model
        self.mesh = mesh
        self.caches = caches
        self.block_size = block_size
        self.device = torch.device(device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, num_tokens: tuple[int, ...]) -> StepResult:
        """Runs one step: every chunk's keys and values into the cache, and the tokens that were asked for.

        Args:
            num_tokens: of each replica's plan for this step, in order of dp rank.

        Raises:
            EngineError: the model gave no numbers to choose from. Every rank has done its part of the step.
        """
        step = self.build_inputs(plan, num_tokens)
        hidden_TD = self.model(step, self.caches)
        if not self.samples:
            self._join_logits(plan, step, hidden_TD)
            return StepResult(step=plan.step, chunks=[])

        # Logits are collective: all of them are computed before anything can be wrong with one of them.
        specs = [chunk.sample for chunk in plan.chunks if chunk.sample is not None]
        logits_LV = self.model.logits(hidden_TD[step.logits_rows]) if specs else None
        failure: EngineError | None = None
        prompts: list[list[TokenLogprobs]] = []
        for chunk, span in zip(plan.chunks, step.spans, strict=True):
            prompts.append([])
            for first, targets in _prompt_pieces(chunk):
                rows_RV = self.model.logits(hidden_TD[span.first_row + first :][: len(targets)])
                try:
                    prompts[-1] += prompt_logprobs(rows_RV, targets, chunk.num_prompt_logprobs or 0)
                except EngineError as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        sampled = iter([] if logits_LV is None else sample(logits_LV, specs))
        results = []
        for chunk, prompt in zip(plan.chunks, prompts, strict=True):
            if chunk.sample is None:
                results.append(ChunkResult(prompt_logprobs=prompt))
            else:
                token = next(sampled)
                results.append(ChunkResult(token_id=token.token_id, logprobs=token.logprobs, prompt_logprobs=prompt))
        return StepResult(step=plan.step, chunks=results)

    def build_inputs(self, plan: StepPlan, num_tokens: tuple[int, ...]) -> StepInputs:
        """A plan as tensors on the device. See `execute`."""
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
            tp_sizes=share_sizes(sum(lengths), self.mesh.tp),
            tokens_per_rank=tuple(size for count in num_tokens for size in share_sizes(count, self.mesh.tp)),
        )

    def _join_logits(self, plan: StepPlan, step: StepInputs, hidden_TD: torch.Tensor) -> None:
        """This rank's part of the logits that the first rank of the replica asks for, in the same order."""
        if any(chunk.sample is not None for chunk in plan.chunks):
            self.model.logits(hidden_TD[step.logits_rows])
        for chunk, span in zip(plan.chunks, step.spans, strict=True):
            for first, targets in _prompt_pieces(chunk):
                self.model.logits(hidden_TD[span.first_row + first :][: len(targets)])

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _prompt_pieces(chunk: Chunk) -> Iterator[tuple[int, list[int]]]:
    """The prompt tokens whose log-probabilities are wanted, so many at a time, with the first row of each piece."""
    if chunk.num_prompt_logprobs is not None:
        for first in range(0, len(chunk.prompt_targets), PROMPT_ROWS):
            yield first, chunk.prompt_targets[first : first + PROMPT_ROWS]
