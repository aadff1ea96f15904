"""The state of running requests that a rank keeps between steps, and the chunks of a plan made complete with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.protocol import Registration, RequestDigest, StepPlan
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.rank_state import request_digest
from moeserve.worker.grammars import Matcher

UNKNOWN_TOKEN = -1  # the newest token of a request while the device computes it


@dataclass(eq=False, slots=True)
class RequestState:
    """One request, as far as plans and sampled tokens have described it."""

    token_ids: list[int]  # prompt and output; see UNKNOWN_TOKEN
    num_prompt_tokens: int
    num_blocks: int  # of its row of the block table
    params: RequestParams
    seed: int
    end_token_ids: list[int]
    matcher: Matcher | None = None  # of params.grammar, on the rank that samples, once it has sampled
    num_blocks_on_device: int = 0  # of its row of the block table, on a device with a copy

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class Chunk(NamedTuple):
    """The tokens of one request that a step computes: a part of its prompt, or its newest token."""

    slot: int
    start: int  # position of the first token
    token_ids: list[int]
    request: RequestState
    samples: bool  # the next token, after the last of these
    prompt_targets: list[int]  # prompt tokens that rows 0, 1, ... predict, if their log-probabilities are wanted

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


class RequestTable:
    """The registered requests of a replica, by slot. All ranks of the replica have the same content."""

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        """
        Args:
            max_blocks: of one request.
        """
        self.block_table: npt.NDArray[np.int32] = np.zeros((num_slots, max_blocks), np.int32)
        self._requests: dict[int, RequestState] = {}

    def apply(self, plan: StepPlan) -> list[Chunk]:
        """Update the table, and return the chunks of the plan."""
        for registration in plan.registrations:
            self._register(registration)
        for slot, block_ids in plan.new_blocks:
            self._append_blocks(slot, self._requests[slot], block_ids)
        for slot, token_id in plan.new_tokens:
            self._requests[slot].token_ids.append(token_id)
        return [
            self._chunk(slot, start, length)
            for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True)
        ]

    def digests(self, slots: Sequence[int]) -> list[RequestDigest]:
        """Return what is compared with the scheduler's state of these requests."""
        requests = [(slot, self._requests[slot]) for slot in slots]
        return [
            request_digest(request.token_ids, self.block_table[slot, : request.num_blocks].tolist())
            for slot, request in requests
        ]

    def append_tokens(self, chunks: Sequence[Chunk], token_ids: list[int]) -> None:
        """Add the sampled tokens, one for each chunk that samples."""
        sampling = (chunk for chunk in chunks if chunk.samples)
        for chunk, token_id in zip(sampling, token_ids, strict=True):
            chunk.request.token_ids.append(token_id)

    def _register(self, registration: Registration) -> None:
        prompt: list[int] = []
        if registration.prompt_slot is not None:
            prompt = self._requests[registration.prompt_slot].token_ids[: registration.num_prompt_tokens]
        request = RequestState(
            token_ids=prompt + registration.token_ids,
            num_prompt_tokens=registration.num_prompt_tokens,
            num_blocks=0,
            params=registration.params,
            seed=registration.seed,
            end_token_ids=registration.end_token_ids,
        )
        self._requests[registration.slot] = request
        self._append_blocks(registration.slot, request, registration.block_ids)

    def _append_blocks(self, slot: int, request: RequestState, block_ids: list[int]) -> None:
        end = request.num_blocks + len(block_ids)
        self.block_table[slot, request.num_blocks : end] = block_ids
        request.num_blocks = end

    def _chunk(self, slot: int, start: int, length: int) -> Chunk:
        request = self._requests[slot]
        end = start + length
        assert end <= len(request.token_ids), (
            f"slot {slot}: tokens to {end} are planned, {len(request.token_ids)} known"
        )
        needs_rows = request.params.prompt_logprobs is not None and request.num_output_tokens == 0
        return Chunk(
            slot=slot,
            start=start,
            token_ids=request.token_ids[start:end],
            request=request,
            samples=end == len(request.token_ids),
            prompt_targets=request.token_ids[start + 1 : end + 1] if needs_rows else [],
        )
