"""The caches of one replica: the blocks and the rows of recurrent states of each request.

The scheduler decides which tokens run. This file finds the cached prefix of a request, and allocates the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moeserve.cache_kind import CacheKind
from moeserve.protocol import CachePlace, SavedState
from moeserve.scheduling.block_pool import BlockPool, num_blocks_for
from moeserve.scheduling.kv_connector import ItemKey
from moeserve.scheduling.request import LiveRequest
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.scheduling.state_pool import StatePool


class NewBlocks(NamedTuple):
    """Blocks that are appended to those of a request."""

    block_ids: list[int]
    window_block_ids: list[int]  # as many blocks of layers with windows, if these have separate blocks


class CachedPrefix(NamedTuple):
    """The cached blocks at the beginning of a request."""

    block_ids: list[int]
    window_block_ids: list[int]  # the last blocks of layers with windows, which the next token reads

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)


class CacheManager:
    """Allocates KV cache blocks and rows of saved states to requests, and finds cached prefixes.

    Layers with windows have separate blocks. A request drops such a block as soon as it is behind the window of the
    first token that is not computed. Plans in flight start at this token or later, so none of them reads a dropped
    block.

    Methods return the items that a store behind the cache should keep, each with its place. Of the layers with windows,
    the store keeps only blocks that a later request needs: the windows at positions where prompts end or diverge, and
    where a request ends.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.window_pool = BlockPool(config.num_window_blocks if config.window else 0)
        self.states: StatePool | None = None  # None: no layer of the model has a recurrent state
        if config.num_saved_states is not None:
            self.states = StatePool(config.max_num_seqs, config.num_saved_states)
        size = config.block_size
        # Distance in tokens between positions at which a request can continue a cached prefix.
        self._interval = size if self.states is None else num_blocks_for(config.state_interval, size) * size
        self.pools = {
            CacheKind.BLOCK: self.pool,
            CacheKind.WINDOW_BLOCK: self.window_pool,
            CacheKind.STATE: BlockPool(0) if self.states is None else self.states.pool,
        }

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds, including those kept for the prefix cache."""
        return self.pool.num_free

    def cached_prefix(self, request: LiveRequest) -> CachedPrefix:
        """Return the longest cached prefix of a request, without its last token, which is always computed."""
        num_blocks = self._usable_blocks(request, self._is_cached, self.most_cached_blocks(request))
        digests = [request.digest(index, self.config.block_size) for index in range(num_blocks)]
        in_window = digests[self._first_block_of_window(num_blocks * self.config.block_size) :]
        return CachedPrefix(
            list(map(self.pool.block_of, digests)),
            list(map(self.window_pool.block_of, in_window)) if self.config.window else [],
        )

    def num_loadable_blocks(self, request: LiveRequest, is_stored: Callable[[ItemKey], bool]) -> int:
        """Return the number of a request's first blocks that can be used after loading items from a store.

        Args:
            is_stored: returns True if the store has an item.
        """

        def has(key: ItemKey) -> bool:
            return self._is_cached(key) or is_stored(key)

        return self._usable_blocks(request, has, self.most_cached_blocks(request))

    def prefix_for_others(self, request: LiveRequest) -> list[ItemKey]:
        """Return the items of the longest cached prefix that requests with the same prompt can use."""
        size = self.config.block_size
        most = (request.num_prompt_tokens - 1) // size
        for index in range(most):  # another block with the same tokens may have been registered instead, and evicted
            digest = request.digest(index, size)
            if self.pool.find(digest) is None:
                self.pool.register(request.block_ids[index], digest)
            if index >= request.num_dropped_blocks and self.config.window and self.window_pool.find(digest) is None:
                self.window_pool.register(request.window_block_ids[index], digest)
        return self.items_of(request, self._usable_blocks(request, self._is_cached, most))

    def items_of(self, request: LiveRequest, num_blocks: int) -> list[ItemKey]:
        """Return all items that a request needs to continue after its first `num_blocks` blocks."""
        size = self.config.block_size
        digests = [request.digest(index, size) for index in range(num_blocks)]
        items = [ItemKey(CacheKind.BLOCK, digest) for digest in digests]
        if self.config.window:
            first = self._first_block_of_window(num_blocks * size)
            items += [ItemKey(CacheKind.WINDOW_BLOCK, digest) for digest in digests[first:]]
        if self.states is not None and digests:
            items.append(ItemKey(CacheKind.STATE, digests[-1]))
        return items

    def most_cached_blocks(self, request: LiveRequest) -> int:
        """Return the maximum number of blocks that a request may reuse. Its last token is always computed."""
        if not self.config.enable_prefix_caching or request.needs_every_prompt_row:
            return 0
        return (len(request.token_ids) - 1) // self.config.block_size

    def has_room(self, request: LiveRequest, prefix: CachedPrefix, num_promised: int, num_running: int) -> bool:
        """Return True if all known tokens of a request fit, leaving one block for each running request to grow.

        For layers with windows, only the longest possible chunk must fit.

        Args:
            prefix: the cached blocks of the request.
            num_promised: number of blocks that running requests still need for their known tokens.
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
        """Return the number of additional blocks that the known tokens of a request need."""
        return max(num_blocks_for(len(request.token_ids), self.config.block_size) - len(request.block_ids), 0)

    def share(self, request: LiveRequest, prefix: CachedPrefix) -> None:
        """Add a cached prefix to a request, which must have no blocks."""
        self.pool.share(prefix.block_ids)
        self.window_pool.share(prefix.window_block_ids)
        request.block_ids = list(prefix.block_ids)
        if self.config.window:
            request.num_dropped_blocks = prefix.num_blocks - len(prefix.window_block_ids)
            request.window_block_ids = [0] * request.num_dropped_blocks + prefix.window_block_ids

    def start(self, request: LiveRequest, prefix: CachedPrefix) -> list[tuple[ItemKey, int]]:
        """Add a cached prefix to a request, whose first planned chunk begins after it.

        Returns:
            The items that a store should keep, because other requests may continue after the same prefix.
        """
        self.share(request, prefix)
        request.num_computed = request.num_planned = prefix.num_blocks * self.config.block_size
        if self.states is not None and prefix.num_blocks:  # the row is held until the request's first plan has ended
            request.state_row = self.states.read(request.digest(prefix.num_blocks - 1, self.config.block_size))
        keys = self.items_of(request, prefix.num_blocks)[prefix.num_blocks :]
        return [(key, self.pools[key.kind].block_of(key.digest)) for key in keys]

    def fits(self, request: LiveRequest, num_tokens: int) -> bool:
        """Return True if enough blocks are free for the next tokens of a request."""
        num_new = self._num_new_blocks(request, num_tokens)
        return num_new <= self.pool.num_free and (not self.config.window or num_new <= self.window_pool.num_free)

    def extend(self, request: LiveRequest, num_tokens: int) -> NewBlocks:
        """Allocate and return the blocks that a request needs for its next tokens. They must fit."""
        num_new = self._num_new_blocks(request, num_tokens)
        added = NewBlocks(self.pool.allocate(num_new), self.window_pool.allocate(num_new) if self.config.window else [])
        request.block_ids += added.block_ids
        request.window_block_ids += added.window_block_ids
        return added

    def register_computed(self, request: LiveRequest, num_tokens: int) -> list[tuple[ItemKey, int]]:
        """Register the blocks that a request's newly computed tokens have filled, so that other requests find them.

        Returns:
            Those of their items that a store should keep.
        """
        if not self.config.enable_prefix_caching:
            return []
        size = self.config.block_size
        filled = range((request.num_computed - num_tokens) // size, request.num_computed // size)
        items = []
        for index in filled:
            digest = request.digest(index, size)
            self.pool.register(request.block_ids[index], digest)
            items.append((ItemKey(CacheKind.BLOCK, digest), request.block_ids[index]))
            if self.config.window:
                self.window_pool.register(request.window_block_ids[index], digest)
                if self._is_likely(request, index):
                    items.append((ItemKey(CacheKind.WINDOW_BLOCK, digest), request.window_block_ids[index]))
        return items

    def drop_behind_window(self, request: LiveRequest) -> None:
        """Free the blocks that are behind the window of all tokens not yet computed."""
        if not self.config.window:
            return
        first = self._first_block_of_window(request.num_computed)
        for index in range(request.num_dropped_blocks, first):
            self.window_pool.release([request.window_block_ids[index]], is_unlikely=not self._is_likely(request, index))
        request.num_dropped_blocks = max(first, request.num_dropped_blocks)

    def _is_likely(self, request: LiveRequest, index: int) -> bool:
        """Return True if a block is in the window at a position where later requests are likely to continue.

        These positions are the end of the cached prefix that this request shared, the position where its tokens diverge
        from an earlier request, and the end of its prompt.
        """
        size = self.config.block_size
        starts = request.branch_point, (request.num_prompt_tokens - 1) // self._interval * self._interval
        return any(self._first_block_of_window(start) <= index < start // size for start in starts)

    def release(self, request: LiveRequest) -> list[tuple[ItemKey, int]]:
        """Free the blocks of a request.

        Returns:
            The items of layers with windows that a store should keep for a request that continues this one.
        """
        self.pool.release(request.block_ids)
        self.window_pool.release(request.window_block_ids[request.num_dropped_blocks :])
        if not self.config.window or not self.config.enable_prefix_caching or self.states is not None:
            return []  # states are saved only within prompts
        num_blocks = min(request.num_computed, len(request.token_ids)) // self.config.block_size
        keys = [key for key in self.items_of(request, num_blocks) if key.kind == CacheKind.WINDOW_BLOCK]
        places = [self.window_pool.find(key.digest) for key in keys]
        return [(key, place) for key, place in zip(keys, places, strict=True) if place is not None]

    def save_state(self, request: LiveRequest, num_tokens: int) -> SavedState | None:
        """Allocate a row for a state within a chunk of a prompt, at the branch point or after the last whole interval.

        A request whose prompt continues this prompt starts after the last whole interval.
        """
        if self.states is None or num_tokens == 1 or not self.config.enable_prefix_caching:
            return None
        size = self.config.block_size
        start, end = request.num_planned, request.num_planned + num_tokens
        last = end - end % self._interval
        position = request.branch_point if start < request.branch_point <= end else last
        if position <= start or self.states.has(request.digest(position // size - 1, size)):
            return None
        row = self.states.take()
        return None if row is None else SavedState(request.slot, row, position - start)

    def save_before_drafts(self, request: LiveRequest, num_tokens: int) -> SavedState | None:
        """Return the command to save the state before the drafts of a chunk, in the other row of its request.

        Args:
            num_tokens: tokens of the chunk, without drafts.
        """
        if self.states is None:
            return None
        return SavedState(request.slot, self.states.other_row(request.slot, request.own_state_row), num_tokens)

    def return_before_drafts(self, request: LiveRequest) -> bool:
        """Restore the state before drafts, one of which was rejected. Return False if the model has no states."""
        if self.states is None:
            return False
        request.state_row = self.states.other_row(request.slot, request.own_state_row)
        request.own_state_row, request.has_moved_state = request.state_row, True
        return True

    def end_save(
        self, request: LiveRequest, saved: SavedState, start: int, *, is_kept: bool
    ) -> list[tuple[ItemKey, int]]:
        """Make the state that a chunk has saved available to other requests.

        Args:
            start: position of the chunk's first token.
            is_kept: False if the state was not computed.

        Returns:
            The items that a store should keep.
        """
        assert self.states is not None
        if not is_kept:
            self.states.release(saved.row)
            return []
        size = self.config.block_size
        digest = request.digest((start + saved.num_tokens) // size - 1, size)
        return [(ItemKey(CacheKind.STATE, digest), self.states.register(saved.row, digest))]

    def saved_row_of(self, request: LiveRequest) -> int | None:
        """Return the row if the next chunk of a request starts from a saved state, otherwise None."""
        is_saved = self.states is not None and request.state_row in self.states.rows
        return request.state_row if is_saved else None

    def end_read(self, row: int) -> None:
        """Release the row of a saved state after the plan that has read it."""
        assert self.states is not None
        self.states.release(row)

    def check_invariants(
        self, holders: Sequence[LiveRequest], of_transfers: Sequence[CachePlace], rows_in_use: list[int]
    ) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent.

        Args:
            holders: requests that hold blocks.
            of_transfers: places held by transfers.
            rows_in_use: rows of saved states that plans in flight read or write.
        """
        held: dict[CacheKind, list[int]] = {kind: [] for kind in CacheKind}
        for place in of_transfers:
            held[place.kind].append(place.index)
        for each in holders:
            held[CacheKind.BLOCK] += each.block_ids
            held[CacheKind.WINDOW_BLOCK] += each.window_block_ids[each.num_dropped_blocks :]
        self.pool.check_invariants(held[CacheKind.BLOCK])
        self.window_pool.check_invariants(held[CacheKind.WINDOW_BLOCK])
        for request in holders if self.config.window else ():
            assert len(request.window_block_ids) == len(request.block_ids), request
            first = self._first_block_of_window(request.num_computed)
            assert request.ended or request.num_dropped_blocks == first or not request.block_ids, request
        if self.states is not None:
            self.states.check_invariants(rows_in_use, held[CacheKind.STATE])

    def _num_new_blocks(self, request: LiveRequest, num_tokens: int) -> int:
        """Return the number of new blocks for the next tokens of a request. Blocks of rejected drafts are reused."""
        num_blocks = num_blocks_for(request.num_planned + num_tokens, self.config.block_size)
        return max(num_blocks - len(request.block_ids), 0)

    def _first_block_of_window(self, position: int) -> int:
        """Return the index of the first block that the token at a position reads."""
        return max(0, position - self.config.window + 1) // self.config.block_size

    def _is_cached(self, key: ItemKey) -> bool:
        return self.pools[key.kind].find(key.digest) is not None

    def _usable_blocks(self, request: LiveRequest, has: Callable[[ItemKey], bool], most: int) -> int:
        """Return the number of a request's first blocks, at most `most`, after which the request can continue.

        All items that the next token needs must be available.

        Args:
            has: returns True if an item is available.
        """
        size = self.config.block_size
        found = (has(ItemKey(CacheKind.BLOCK, request.digest(index, size))) for index in range(most))
        end = next((index for index, is_there in enumerate(found) if not is_there), most)
        end -= end % (self._interval // size)
        # If the usable prefix is shorter than `end`, an earlier request diverges from this one here. More requests may
        # share these blocks, so the request saves its state and its window here.
        request.branch_point = max(request.branch_point, end * size)
        while (
            shorter := self._num_blocks_with_state(request, self._num_blocks_with_window(request, end, has), has)
        ) < end:
            end = shorter
        return end

    def _num_blocks_with_window(self, request: LiveRequest, num_blocks: int, has: Callable[[ItemKey], bool]) -> int:
        """Return the number of a request's first blocks, at most `num_blocks`, whose last window is available."""
        if not self.config.window:
            return num_blocks
        size, end = self.config.block_size, num_blocks
        index = end - 1
        while index >= self._first_block_of_window(end * size):
            if not has(ItemKey(CacheKind.WINDOW_BLOCK, request.digest(index, size))):
                end = index  # the window of every longer prefix up to the previous end includes this block
            index -= 1
        return end

    def _num_blocks_with_state(self, request: LiveRequest, num_blocks: int, has: Callable[[ItemKey], bool]) -> int:
        """Return the largest number of a request's first blocks, at most `num_blocks`, that end at a saved state."""
        if self.states is None:
            return num_blocks
        size, step = self.config.block_size, self._interval // self.config.block_size
        ends = range(num_blocks - num_blocks % step, 0, -step)
        return next((end for end in ends if has(ItemKey(CacheKind.STATE, request.digest(end - 1, size)))), 0)
