"""The caches of one replica: which blocks and which rows of recurrent states each request has.

The scheduler decides which tokens run. This file finds what of a request is cached already, and allocates the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

from moeserve.protocol import SavedState
from moeserve.scheduling.block_pool import BlockPool, num_blocks_for
from moeserve.scheduling.request import LiveRequest
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.scheduling.state_pool import StatePool


class CacheManager:
    """Allocates KV cache blocks and rows of saved states to requests, and finds cached prefixes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.states: StatePool | None = None  # None: no layer of the model has a state
        if config.num_saved_states is not None:
            self.states = StatePool(config.max_num_seqs, config.num_saved_states)
        self._state_interval = -(-config.state_interval // config.block_size) * config.block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, including those kept for the prefix cache."""
        return self.pool.num_free

    def begin_plan(self) -> None:
        """Begin another plan."""
        if self.states is not None:
            self.states.begin_plan()

    def cached_prefix(self, request: LiveRequest) -> list[int]:
        """Return the longest run of cached blocks that a request begins with. Its last token is always computed."""
        prefix: list[int] = []
        if not self.config.enable_prefix_caching or request.needs_every_prompt_row:
            return prefix
        for index in range((len(request.token_ids) - 1) // self.config.block_size):
            block_id = self.pool.find(request.digest(index, self.config.block_size))
            if block_id is None:
                break
            prefix.append(block_id)
        return prefix if self.states is None else prefix[: self._num_blocks_with_state(request, len(prefix))]

    def has_room(self, request: LiveRequest, prefix: list[int], num_reserved: int) -> bool:
        """Return True if all known tokens of a request fit, beside `num_reserved` blocks for others.

        Args:
            prefix: blocks of the request that are in the cache.
        """
        num_shared = sum(not self.pool.is_free(block_id) for block_id in prefix)
        return self.num_missing_blocks(request) - num_shared + num_reserved <= self.pool.num_free

    def num_missing_blocks(self, request: LiveRequest) -> int:
        """Return how many more blocks the known tokens of a request need."""
        return max(num_blocks_for(len(request.token_ids), self.config.block_size) - len(request.block_ids), 0)

    def share(self, request: LiveRequest, prefix: list[int]) -> None:
        """Give a request its cached prefix. It has no other blocks."""
        self.pool.share(prefix)
        request.block_ids = prefix

    def start(self, request: LiveRequest, prefix: list[int]) -> None:
        """Give a request its cached prefix, behind which its first planned chunk begins."""
        self.share(request, prefix)
        if self.states is not None and prefix:
            request.state_row = self.states.read(request.digest(len(prefix) - 1, self.config.block_size))
        request.num_computed = request.num_planned = len(prefix) * self.config.block_size

    def fits(self, request: LiveRequest, num_tokens: int) -> bool:
        """Return True if enough blocks are free for the next tokens of a request."""
        return self._num_new_blocks(request, num_tokens) <= self.pool.num_free

    def extend(self, request: LiveRequest, num_tokens: int) -> list[int]:
        """Allocate the blocks that a request needs for its next tokens. Return them. They must fit."""
        added = self.pool.allocate(self._num_new_blocks(request, num_tokens))
        request.block_ids += added
        return added

    def register_computed(self, request: LiveRequest, num_tokens: int) -> list[tuple[bytes, int]]:
        """Let other requests find the blocks that the last computed tokens of a request have filled.

        Returns:
            Digests and blocks.
        """
        if not self.config.enable_prefix_caching:
            return []
        size = self.config.block_size
        filled = range((request.num_computed - num_tokens) // size, request.num_computed // size)
        registered = [(request.digest(index, size), request.block_ids[index]) for index in filled]
        for digest, block_id in registered:
            self.pool.register(block_id, digest)
        return registered

    def release(self, request: LiveRequest) -> None:
        """Free the blocks of a request."""
        self.pool.release(request.block_ids)

    def save_state(self, request: LiveRequest, num_tokens: int) -> SavedState | None:
        """Allocate a row for a state within a chunk of a prompt: at the branch point, or after the last whole interval.

        A request whose prompt continues this one starts at the latter.
        """
        if self.states is None or num_tokens == 1 or not self.config.enable_prefix_caching:
            return None
        size = self.config.block_size
        start, end = request.num_planned, request.num_planned + num_tokens
        last = end - end % self._state_interval
        position = request.branch_point if start < request.branch_point <= end else last
        if position <= start or self.states.has(request.digest(position // size - 1, size)):
            return None
        row = self.states.take()
        return None if row is None else SavedState(request.slot, row, position - start)

    def save_before_drafts(self, request: LiveRequest, num_tokens: int) -> SavedState | None:
        """Return what saves the state before the drafts of a chunk, in the other row of its request.

        Args:
            num_tokens: of the chunk, without drafts.
        """
        if self.states is None:
            return None
        return SavedState(request.slot, self.states.other_row(request.slot, request.own_state_row), num_tokens)

    def return_before_drafts(self, request: LiveRequest) -> bool:
        """Return a request to its state before drafts, one of which was rejected. Return False if it has no state."""
        if self.states is None:
            return False
        request.state_row = self.states.other_row(request.slot, request.own_state_row)
        request.own_state_row, request.has_moved_state = request.state_row, True
        return True

    def end_save(self, request: LiveRequest, saved: SavedState, start: int, *, is_kept: bool) -> None:
        """Make the state that a chunk has saved available to other requests, if it was computed.

        Args:
            start: of the chunk.
        """
        assert self.states is not None
        if not is_kept:
            self.states.release(saved.row)
            return
        size = self.config.block_size
        self.states.register(saved.row, request.digest((start + saved.num_tokens) // size - 1, size))

    def check_invariants(self, held: Iterable[int], saving: set[int]) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent.

        Args:
            held: the blocks of all holders.
            saving: rows of states that plans in flight write.
        """
        self.pool.check_invariants(held)
        if self.states is not None:
            self.states.check_invariants(saving)

    def _num_new_blocks(self, request: LiveRequest, num_tokens: int) -> int:
        """Return how many blocks the next tokens of a request need. It may have those of rejected drafts already."""
        num_blocks = num_blocks_for(request.num_planned + num_tokens, self.config.block_size)
        return max(num_blocks - len(request.block_ids), 0)

    def _num_blocks_with_state(self, request: LiveRequest, num_blocks: int) -> int:
        """Return how many of a request's first blocks, all of them cached, end at or before a saved state.

        If there are more cached blocks, an earlier request diverges from this one after them. More requests may share
        this prefix, so the request saves its state there.
        """
        assert self.states is not None
        size, per_interval = self.config.block_size, self._state_interval // self.config.block_size
        last = num_blocks - num_blocks % per_interval
        ends = range(last, 0, -per_interval)
        found = next((end for end in ends if self.states.has(request.digest(end - 1, size))), 0)
        request.branch_point = last * size if last > found else 0
        return found
