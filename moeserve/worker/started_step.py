"""`StartedStep`: a step that the device may still compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from moeserve.protocol import ChunkResult, LogprobRows
from moeserve.worker.request_table import Chunk, RequestState
from moeserve.worker.sampler import CAUSE_OF_DAMAGE, SampledToken, sampled_tokens
from moeserve.worker.step_memory import Reading


@dataclass(eq=False, kw_only=True)
class StartedStep:
    """The results of a step, once the device has computed them."""

    chunks: Sequence[Chunk]  # none on a rank that returns no results
    prompts: Sequence[list[LogprobRows | str]]  # of each chunk
    sampled: list[SampledToken] | None  # None: they are read
    # If the last row of each chunk is finite (empty if all sample); then tokens [L] and highest logits [L], if read.
    reading: Reading
    places: Sequence[tuple[RequestState, int]]  # where tokens that are read belong
    logits_dtype: torch.dtype
    raise_failure: Callable[[], None]  # raises the error of a collective of this step
    _results: list[ChunkResult] | None = field(default=None, init=False)

    @property
    def is_done(self) -> bool:
        """True if `finish` returns at once."""
        return self._results is not None or self.reading.is_done

    def finish(self) -> list[ChunkResult]:
        """Wait for the device, and return the results of the chunks. May be called again.

        Raises:
            DistributedError: a collective of the step failed.
        """
        if self._results is None:
            self._results = self._finish()
        return self._results

    def _finish(self) -> list[ChunkResult]:
        is_finite, *chosen = self.reading.wait()
        self.raise_failure()
        if chosen:
            tokens_L, highest_L = chosen
            self.sampled = sampled_tokens(tokens_L, highest_L, self.logits_dtype)
            for (request, index), token in zip(self.places, self.sampled, strict=False):
                request.token_ids[index] = token.token_id
        assert self.sampled is not None
        sampled, finite = iter(self.sampled), is_finite.tolist()
        return [
            _chunk_result(next(sampled), prompt, is_damaged=False)
            if chunk.samples
            else _chunk_result(None, prompt, is_damaged=not finite[index])
            for index, (chunk, prompt) in enumerate(zip(self.chunks, self.prompts, strict=False))
        ]


def _chunk_result(token: SampledToken | None, prompt: list[LogprobRows | str], *, is_damaged: bool) -> ChunkResult:
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
