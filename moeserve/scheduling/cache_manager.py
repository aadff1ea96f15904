"""The caches of one replica: which blocks and which rows of recurrent states each request has.

The scheduler decides which tokens run. This file finds what of a request is cached already, and allocates the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moeserve.protocol import SavedState
from moeserve.scheduling.block_pool import BlockPool, num_blocks_for
from moeserve.scheduling.request import LiveRequest
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.scheduling.state_pool import StatePool


class NewBlocks(NamedTuple):
    """Blocks that are appended to those of a request."""

    block_ids: list[int]
    window_block_ids: list[int]  # of layers with windows, as many if these have their own


class CachedPrefix(NamedTuple):
    """Cached blocks that a request begins with."""

    block_ids: list[int]
    window_block_ids: list[int]  # the last ones of layers with windows, which the next token reads

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)


class CacheManager:
    """Allocates KV cache blocks and rows of saved states to requests, and finds cached prefixes.

    Layers with windows have blocks of their own, which a request holds while its later tokens may read them: as soon as
    the tokens before a position are computed, it drops those behind the window of this position. Plans in flight start
    at this position or later, so none of them reads a dropped block.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.window_pool = BlockPool(config.num_window_blocks if config.window else 0)
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

    def cached_prefix(self, request: LiveRequest) -> CachedPrefix:
        """Return the longest run of cached blocks that a request begins with. Its last token is always computed."""
        size = self.config.block_size
        block_ids: list[int] = []
        if not self.config.enable_prefix_caching or request.needs_every_prompt_row:
            return CachedPrefix([], [])
        for index in range((len(request.token_ids) - 1) // size):
            block_id = self.pool.find(request.digest(index, size))
            if block_id is None:
                break
            block_ids.append(block_id)
        per_state = 1 if self.states is None else self._state_interval // size
        end = len(block_ids) - len(block_ids) % per_state
        # If the prefix ends before this, an earlier request diverges from this one here. More requests may share these
        # blocks, so the request keeps its state and its window here.
        request.branch_point = end * size
        while (shorter := self._num_blocks_with_state(request, self._num_blocks_with_window(request, end))) < end:
            end = shorter
        in_window = range(self._first_block_of_window(end * size), end) if self.config.window else range(0)
        return CachedPrefix(block_ids[:end], [self.window_pool.block_of(request.digest(i, size)) for i in in_window])

    def has_room(self, request: LiveRequest, prefix: CachedPrefix, num_promised: int, num_running: int) -> bool:
        """Return True if all known tokens of a request fit, leaving one block for each running request to grow.

        Of layers with windows, the longest chunk fits.

        Args:
            prefix: blocks of the request that are in the cache.
            num_promised: blocks that running requests need for their known tokens.
        """
        size = self.config.block_size
        num_shared = sum(not self.pool.is_free(block_id) for block_id in prefix.block_ids)
        if self.num_missing_blocks(request) - num_shared + num_promised + num_running > self.pool.num_free:
            return False
        if not self.config.window:
            return True
        num_taken = sum(map(self.window_pool.is_free, prefix.window_block_ids))
        num_tokens = min(len(request.token_ids) - prefix.num_blocks * size, self.config.max_num_batched_tokens)
        return num_taken + num_blocks_for(num_tokens, size) + num_running <= self.window_pool.num_free

    def num_missing_blocks(self, request: LiveRequest) -> int:
        """Return how many more blocks the known tokens of a request need."""
        return max(num_blocks_for(len(request.token_ids), self.config.block_size) - len(request.block_ids), 0)

    def share(self, request: LiveRequest, prefix: CachedPrefix) -> None:
        """Give a request its cached prefix. It has no other blocks."""
        self.pool.share(prefix.block_ids)
        self.window_pool.share(prefix.window_block_ids)
        request.block_ids = list(prefix.block_ids)
        if self.config.window:
            request.num_dropped_blocks = prefix.num_blocks - len(prefix.window_block_ids)
            request.window_block_ids = [0] * request.num_dropped_blocks + prefix.window_block_ids

    def start(self, request: LiveRequest, prefix: CachedPrefix) -> None:
        """Give a request its cached prefix, behind which its first planned chunk begins."""
        self.share(request, prefix)
        if self.states is not None and prefix.num_blocks:
            request.state_row = self.states.read(request.digest(prefix.num_blocks - 1, self.config.block_size))
        request.num_computed = request.num_planned = prefix.num_blocks * self.config.block_size

    def fits(self, request: LiveRequest, num_tokens: int) -> bool:
        """Return True if enough blocks are free for the next tokens of a request."""
        num_new = self._num_new_blocks(request, num_tokens)
        return num_new <= self.pool.num_free and (not self.config.window or num_new <= self.window_pool.num_free)

    def extend(self, request: LiveRequest, num_tokens: int) -> NewBlocks:
        """Allocate the blocks that a request needs for its next tokens. Return them. They must fit."""
        num_new = self._num_new_blocks(request, num_tokens)
        added = NewBlocks(self.pool.allocate(num_new), self.window_pool.allocate(num_new) if self.config.window else [])
        request.block_ids += added.block_ids
        request.window_block_ids += added.window_block_ids
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
        if self.config.window:
            for index in filled:
                self.window_pool.register(request.window_block_ids[index], request.digest(index, size))
        return registered

    def drop_behind_window(self, request: LiveRequest) -> None:
        """Free the blocks that no token after the computed ones reads."""
        if not self.config.window:
            return
        first, size = self._first_block_of_window(request.num_computed), self.config.block_size
        # Where a later request may begin: behind what this one shared, or has in common with an earlier one, and behind
        # its prompt.
        starts = request.branch_point, (request.num_prompt_tokens - 1) // size * size
        for index in range(request.num_dropped_blocks, first):
            is_in_window = any(self._first_block_of_window(start) <= index < start // size for start in starts)
            self.window_pool.release([request.window_block_ids[index]], is_unlikely=not is_in_window)
        request.num_dropped_blocks = max(first, request.num_dropped_blocks)

    def release(self, request: LiveRequest) -> None:
        """Free the blocks of a request."""
        self.pool.release(request.block_ids)
        self.window_pool.release(request.window_block_ids[request.num_dropped_blocks :])

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

    def check_invariants(self, holders: Sequence[LiveRequest], of_transfers: Sequence[int], saving: set[int]) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent.

        Args:
            holders: requests that hold blocks.
            of_transfers: blocks that transfers hold.
            saving: rows of states that plans in flight write.
        """
        self.pool.check_invariants([*(block for each in holders for block in each.block_ids), *of_transfers])
        in_windows = (block for each in holders for block in each.window_block_ids[each.num_dropped_blocks :])
        self.window_pool.check_invariants(in_windows)
        for request in holders if self.config.window else ():
            assert len(request.window_block_ids) == len(request.block_ids), request
            first = self._first_block_of_window(request.num_computed)
            assert request.ended or request.num_dropped_blocks == first or not request.block_ids, request
        if self.states is not None:
            self.states.check_invariants(saving)

    def _num_new_blocks(self, request: LiveRequest, num_tokens: int) -> int:
        """Return how many blocks the next tokens of a request need. It may have those of rejected drafts already."""
        num_blocks = num_blocks_for(request.num_planned + num_tokens, self.config.block_size)
        return max(num_blocks - len(request.block_ids), 0)

    def _first_block_of_window(self, position: int) -> int:
        """Return the index of the first block that the token at a position reads."""
        return max(0, position - self.config.window + 1) // self.config.block_size

    def _num_blocks_with_window(self, request: LiveRequest, num_blocks: int) -> int:
        """Return how many of a request's first blocks can be used, because those in the window behind them are cached.

        Args:
            num_blocks: at most.
        """
        if not self.config.window:
            return num_blocks
        size, end = self.config.block_size, num_blocks
        index = end - 1
        while index >= self._first_block_of_window(end * size):
            if self.window_pool.find(request.digest(index, size)) is None:
                end = index  # each longer prefix up to the previous end has this block in its window
            index -= 1
        return end

    def _num_blocks_with_state(self, request: LiveRequest, num_blocks: int) -> int:
        """Return how many of a request's first blocks, at most `num_blocks`, end at a saved state."""
        if self.states is None:
            return num_blocks
        size, per_interval = self.config.block_size, self._state_interval // self.config.block_size
        ends = range(num_blocks - num_blocks % per_interval, 0, -per_interval)
        return next((end for end in ends if self.states.has(request.digest(end - 1, size))), 0)
