"""`PendingStep`: a step that the device may still be computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from moeserve.ops.reading import Reading
from moeserve.protocol import ChunkResult, LogprobRows, RouteRows
from moeserve.worker.drafting import Drafter, accepted_tokens
from moeserve.worker.request_table import Chunk
from moeserve.worker.sampler import CAUSE_OF_DAMAGE, NUM_PROMPT_TENSORS, SampledRows, SampledToken, prompt_rows


@dataclass(eq=False, kw_only=True)
class PendingStep:
    """A step whose results are read from the device when they have been computed."""

    chunks: Sequence[Chunk]  # empty on a rank that returns no results
    sampling: Sequence[Chunk]  # the chunks that sample
    # For each chunk, a flag that the chunk's last row is finite (no flags if all chunks sample); then the tensors of
    # `prompt_logprobs` for each chunk with targets, if chunks are returned; then those of `sampled` and of `drafter`.
    reading: Reading
    sampled: SampledRows | None = None  # None: no chunk samples
    drafter: Drafter | None = None  # drafter of the tokens after the results; None: no speculative decoding
    num_draft_tensors: int = 0  # number of tensors for the drafter, which are the last in `reading`
    appends_samples: bool = False  # replace UNKNOWN_TOKEN in the requests by the sampled tokens
    raise_failure: Callable[[], None]  # raises the error of a collective of this step
    routes: RouteRows | None = None  # experts of this rank's rows; None: experts are not reported
    _results: list[ChunkResult] | None = field(default=None, init=False)

    @property
    def is_done(self) -> bool:
        """True if `finish` would return without waiting."""
        return self._results is not None or self.reading.is_done

    def finish(self) -> list[ChunkResult]:
        """Wait for the device, and return the results of the chunks. May be called more than once.

        Raises:
            DistributedError: a collective of the step failed.
        """
        if self._results is None:
            self._results = self._finish()
        return self._results

    def _finish(self) -> list[ChunkResult]:
        is_finite, *tensors = self.reading.wait()
        self.raise_failure()
        num_others = len(tensors) - self.num_draft_tensors
        tensors, of_drafter = tensors[:num_others], tensors[num_others:]
        if self.appends_samples and self.sampled is not None:
            tokens_L = tensors[len(tensors) - len(self.sampled.tensors)]
            for chunk, token_id in zip(self.sampling, tokens_L.tolist(), strict=True):
                chunk.request.token_ids[chunk.start + len(chunk.token_ids)] = token_id
        if not self.chunks:
            return []
        prompts: dict[int, LogprobRows | str] = {}
        for index, chunk in enumerate(self.chunks):
            if chunk.prompt_targets:
                prompts[index] = prompt_rows(tensors[:NUM_PROMPT_TENSORS])
                del tensors[:NUM_PROMPT_TENSORS]
        sampled = [] if self.sampled is None else self._sampled(self.sampled.results(tensors), of_drafter)
        if len(sampled) == len(self.chunks) and not prompts:
            return sampled
        remaining, finite = iter(sampled), is_finite.tolist()
        return [
            _chunk_result(next(remaining), prompts.get(index), is_damaged=False)
            if chunk.samples
            else _chunk_result(ChunkResult(), prompts.get(index), is_damaged=not finite[index])
            for index, chunk in enumerate(self.chunks)
        ]

    def _sampled(self, tokens: Sequence[SampledToken], of_drafter: Sequence[Tensor]) -> list[ChunkResult]:
        """Return the results of the chunks that sample."""
        results, first_row = [], 0
        for index, chunk in enumerate(self.sampling):
            result = accepted_tokens(chunk.drafts, tokens[first_row : first_row + chunk.num_sampled])
            if self.drafter is not None and result.error is None:
                drafts = self.drafter.propose(chunk.request, result.token_ids, index, of_drafter)
                result = msgspec.structs.replace(result, draft_token_ids=drafts)
            results.append(result)
            first_row += chunk.num_sampled
        return results


def _chunk_result(sampled: ChunkResult, prompt: LogprobRows | str | None, *, is_damaged: bool) -> ChunkResult:
    """Return the result of one chunk.

    Args:
        sampled: the chunk's result without prompt log-probabilities; empty if nothing is sampled.
        is_damaged: the chunk's last row is not finite, and nothing is sampled from it. Its keys and values may be
            damaged too, and must not be added to the prefix cache.
    """
    if isinstance(prompt, str):
        return ChunkResult(error=prompt)
    if is_damaged:
        return ChunkResult(error="the model produced NaN or infinite hidden states; " + CAUSE_OF_DAMAGE)
    if prompt is None or sampled.error is not None:
        return sampled
    return msgspec.structs.replace(sampled, prompt_logprobs=[prompt])
