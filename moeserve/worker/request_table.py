"""The state of running requests that a rank keeps between steps, and the chunks that it builds from plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.protocol import Registration, RequestDigest, StepPlan
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.rank_state import request_digest
from moeserve.step_inputs import SAMPLING_SETTINGS
from moeserve.worker.grammars import Matcher
from moeserve.worker.token_history import TokenHistory

UNKNOWN_TOKEN = -1  # placeholder for the newest token of a request while the device computes it


@dataclass(eq=False, slots=True)
class RequestState:
    """The state of one request after the plans and sampled tokens so far."""

    token_ids: list[int]  # prompt and output; see UNKNOWN_TOKEN
    num_prompt_tokens: int
    num_blocks: int  # number of blocks in the request's row of each block table
    params: RequestParams
    seed: int
    end_token_ids: list[int]
    forced_routes: bytes = b""  # see `Request`
    matcher: Matcher | None = None  # matcher of params.grammar, only on the rank that samples, after its first sample
    state_row: int = -1  # row of the state before the next token; -1: zeros
    own_state_row: int = -1  # row to which the request's chunks write their final state
    history: TokenHistory | None = None  # the request's tokens, only on a rank that drafts by n-grams
    first_computed: int | None = None  # first position that was computed here, only on a rank that drafts by modules

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_spec(self) -> bool:
        """True if sampling needs more than the settings of the request; see `SampleSpec`."""
        params = self.params
        return bool(params.changes_scores or params.logprobs is not None or (params.min_tokens and self.end_token_ids))


class ChunkStates(NamedTuple):
    """The rows of the state caches that a chunk reads and writes; see `StateRows`."""

    load: int = -1
    store: int = -1
    save: int = -1
    num_before_save: int = 1


NO_STATES = ChunkStates()


class Chunk(NamedTuple):
    """The tokens of one request that a step computes: a part of its prompt, or its newest token and drafts."""

    slot: int
    start: int  # position of the first token
    token_ids: list[int]  # drafts come last
    request: RequestState
    samples: bool  # sample the token after the last token that is not a draft, and the token after each draft
    prompt_targets: Sequence[int]  # prompt tokens that rows 0, 1, ... predict, if their log-probabilities are requested
    states: ChunkStates = NO_STATES
    drafts: Sequence[int] = ()

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Number of rows that sample a token each. They are the last rows of the chunk."""
        return 1 + len(self.drafts) if self.samples else 0


class RequestTable:
    """The registered requests of a replica, by slot. All ranks of the replica have the same content."""

    def __init__(self, num_slots: int, max_blocks: int, num_groups: int = 1) -> None:
        """
        Args:
            max_blocks: maximum number of blocks of one request.
            num_groups: number of cache groups with blocks.
        """
        self.num_slots = num_slots
        # [groups, slots, blocks]: the block table of each group.
        self.tables: npt.NDArray[np.int32] = np.zeros((num_groups, num_slots, max_blocks), np.int32)
        self.settings = np.zeros(num_slots + 1, SAMPLING_SETTINGS)  # the last row is for padding, and is greedy
        self.has_spec: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)  # see `RequestState.has_spec`
        # Changes since the copy on a device was last updated:
        self.added_slots: list[int] = []
        self.added_blocks: list[tuple[int, int, int]] = []  # slot, first block, end; in the tables of all groups
        self._requests: dict[int, RequestState] = {}

    def add(self, slot: int, request: RequestState, tables: Sequence[Sequence[int]]) -> None:
        """Put a request into a slot, with its blocks by cache group."""
        params = request.params
        self.settings[slot] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.top_k,
            request.num_prompt_tokens,
            request.seed,
        )
        self.has_spec[slot] = request.has_spec
        self.added_slots.append(slot)
        self._requests[slot] = request
        self._append_blocks(slot, request, tables)

    def forget_changes(self) -> None:
        """Clear the lists of changes since the copy on a device was updated."""
        self.added_slots, self.added_blocks = [], []

    def apply(self, plan: StepPlan) -> list[Chunk]:
        """Update the table, and return the chunks of the plan."""
        for registration in plan.registrations:
            self._register(registration)
        for slot, added in plan.cache.new_blocks:
            self._append_blocks(slot, self._requests[slot], added)
        for slot, new_ids in plan.new_tokens:
            self._requests[slot].token_ids += new_ids
        for slot, row in plan.cache.moved_rows:
            self._requests[slot].state_row = self._requests[slot].own_state_row = row
        drafts_of_slot = dict(plan.drafts)
        saved = {state.slot: state for state in plan.cache.saved_states}
        chunks = []
        for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True):
            request, drafts = self._requests[slot], drafts_of_slot.get(slot, [])
            token_ids, end = request.token_ids, start + length - len(drafts)
            assert end <= len(token_ids), f"slot {slot}: tokens to {end} are planned, {len(token_ids)} known"
            targets: Sequence[int] = ()
            if request.params.prompt_logprobs is not None and request.num_output_tokens == 0:
                targets = token_ids[start + 1 : end + 1]
            states = ChunkStates(request.state_row, request.own_state_row)
            if slot in saved:
                states = states._replace(save=saved[slot].row, num_before_save=saved[slot].num_tokens)
            request.state_row = request.own_state_row
            samples = end == len(token_ids)
            chunks.append(Chunk(slot, start, token_ids[start:end] + drafts, request, samples, targets, states, drafts))
        return chunks

    def digests(self, slots: Sequence[int]) -> list[RequestDigest]:
        """Return the digests of these requests, which the scheduler compares with its own state."""
        digests = []
        for slot in slots:
            request = self._requests[slot]
            own_blocks = self.tables[:, slot, : request.num_blocks]
            digests.append(request_digest(request.token_ids, own_blocks.reshape(-1).tolist()))
        return digests

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
            forced_routes=registration.forced_routes,
            state_row=-1 if registration.cache.row is None else registration.cache.row,
            own_state_row=registration.slot,
        )
        self.add(registration.slot, request, registration.cache.tables)

    def _append_blocks(self, slot: int, request: RequestState, added: Sequence[Sequence[int]]) -> None:
        end = request.num_blocks + len(added[0])
        for table, block_ids in zip(self.tables, added, strict=True):
            table[slot, request.num_blocks : end] = block_ids
        self.added_blocks.append((slot, request.num_blocks, end))
        request.num_blocks = end
