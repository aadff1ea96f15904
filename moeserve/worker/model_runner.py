"""Turns a plan into tensors, runs the model on them, and turns what it gave into a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.distributed.mesh import Mesh, share_of, share_sizes
from moeserve.errors import EngineError
from moeserve.models.decoder import Decoder
from moeserve.protocol import Chunk, ChunkResult, StepPlan, StepResult, TokenLogprobs
from moeserve.step_inputs import ChunkSpan, StepInputs
from moeserve.worker.sampler import prompt_logprobs, sample

# Rows of prompt log-probabilities computed at once: a long prompt times a vocabulary would not fit.
PROMPT_ROWS = 64


class ModelRunner:
    """One rank's part of a model, and the caches that its attention layers write to and read from."""

    def __init__(
        self,
        model: Decoder,
        caches: list[Any],
        mesh: Mesh,
        block_size: int,
        device: str,
        *,
        samples: bool = True,
        tp_rank: int = 0,
        forward: Callable[[StepInputs, list[Any]], Tensor] | None = None,
    ) -> None:
        """
        Args:
            samples: whether this rank chooses the tokens; one rank of a replica does.
            tp_rank: of this rank in its replica.
            forward: what gives a step's hidden states in the model's place; None: the model.
        """
        self.samples = samples
        self.tp_rank = tp_rank
        self.model = model
        self.forward = forward or model
        self.mesh = mesh
        self.caches = caches
        self.block_size = block_size
        self.device = torch.device(device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, num_tokens: tuple[int, ...], padded_to: int | None = None) -> StepResult:
        """Runs one step: every chunk's keys and values into the cache, and the tokens that were asked for.

        Args:
            num_tokens: of each replica's plan for this step, in order of dp rank.
            padded_to: rows that all replicas pad a decode step to; None: they do not.

        Raises:
            EngineError: the model gave no numbers to choose from. Every rank has done its part of the step.
        """
        step = self.build_inputs(plan, num_tokens)
        if padded_to is not None:
            step = self._padded(step, padded_to)
        hidden_TD = self.forward(step, self.caches)
        if not self.samples:
            self._join_logits(plan, step, hidden_TD)
            return StepResult(step=plan.step, chunks=[])

        # Logits are collective: all of them are computed before anything can be wrong with one of them.
        specs = [chunk.sample for chunk in plan.chunks if chunk.sample is not None]
        logits_LV = self.model.logits(step.wanted_rows(hidden_TD)) if specs else None
        failure: EngineError | None = None
        prompts: list[list[TokenLogprobs]] = []
        for chunk, span in zip(plan.chunks, step.spans[: len(plan.chunks)], strict=True):
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
        self.model.groups.raise_failure()  # the tokens are on the host, so what a GPU did for them is done
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
        size = self.block_size
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
        return StepInputs(
            token_ids=self._tensor(token_ids, torch.int64),
            positions=self._tensor(positions, torch.int64),
            cache_slots=self._tensor(cache_slots, torch.int64),
            row_starts=self._tensor([*(span.first_row for span in spans), len(token_ids)], torch.int32),
            context_lens=self._tensor([span.context_len for span in spans], torch.int32),
            block_table=self._tensor(block_table, torch.int32).view(len(spans), max_blocks),
            logits_rows=self._tensor(logits_rows, torch.int64),
            spans=tuple(spans),
            tp_sizes=share_sizes(len(token_ids), self.mesh.tp),
            tokens_per_rank=tuple(size for count in num_tokens for size in share_sizes(count, self.mesh.tp)),
            own_rows=share_of(len(token_ids), self.tp_rank, self.mesh.tp),
        )

    def _padded(self, step: StepInputs, size: int) -> StepInputs:
        """The same step, each of its chunks one row, with as many more at its end as are missing."""
        num_tokens, num_missing = len(step.token_ids), size - len(step.token_ids)
        assert len(step.spans) == num_tokens <= size, (len(step.spans), num_tokens, size)
        tp_sizes = share_sizes(size, self.mesh.tp)
        rows = torch.arange(size + 1, dtype=torch.int32, device=self.device)
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
            tokens_per_rank=tp_sizes * self.mesh.dp,
            padding=rows[:size] >= num_tokens,
            own_rows=share_of(size, self.tp_rank, self.mesh.tp),
        )

    def _join_logits(self, plan: StepPlan, step: StepInputs, hidden_TD: Tensor) -> None:
        """This rank's part of the logits that the first rank of the replica asks for, in the same order."""
        if any(chunk.sample is not None for chunk in plan.chunks):
            self.model.logits(step.wanted_rows(hidden_TD))
        for chunk, span in zip(plan.chunks, step.spans[: len(plan.chunks)], strict=True):
            for first, targets in _prompt_pieces(chunk):
                self.model.logits(hidden_TD[span.first_row + first :][: len(targets)])

    def _tensor(self, numbers: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(self.device, non_blocking=True)


def _prompt_pieces(chunk: Chunk) -> Iterator[tuple[int, list[int]]]:
    """The prompt tokens whose log-probabilities are wanted, so many at a time, with the first row of each piece."""
    if chunk.num_prompt_logprobs is not None:
        for first in range(0, len(chunk.prompt_targets), PROMPT_ROWS):
            yield first, chunk.prompt_targets[first : first + PROMPT_ROWS]
