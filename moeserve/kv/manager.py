"""The caches of one replica: the blocks and states that each request holds in every group of layers.

The scheduler decides which tokens run. This file finds the cached prefix of a request, and allocates memory for its
other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from moeserve.cache_kind import CacheKind
from moeserve.kv.connector import ItemKey
from moeserve.kv.pool import BlockPool, num_blocks_for
from moeserve.kv.requests import CachedRequest, RequestCache
from moeserve.kv.rules import CacheGroup, Has, KeepAll, KeepState, RuleOfBlocks
from moeserve.kv.state_pool import StatePool
from moeserve.protocol import CacheChanges, CachePlace, CacheStart, SavedState

NewBlocks: TypeAlias = list[list[int]]  # by group: blocks that are appended to a request's table; empty: none
ToStore: TypeAlias = list[ItemKey]  # cached items that a store behind the cache should keep


class Prefix(NamedTuple):
    """The first blocks of a request that are cached, so that the request can start after them."""

    num_blocks: int
    # Position up to which all tokens are known. If the position is after the prefix, an earlier request diverges there,
    # and further requests may diverge there too.
    branch_point: int


class ChunkItems(NamedTuple):
    """The states that a chunk of a plan reads and writes, and the number of blocks of its request."""

    num_blocks: int  # blocks of the request after the plan
    moved_row: int | None = None  # the new row of the request's state, which has moved
    read_row: int | None = None  # row of a saved state from which the chunk starts
    saved: SavedState | None = None
    is_for_others: bool = False  # other requests can start from the saved state; False for the state before drafts


class CacheLimits(Protocol):
    """The limits of a replica that concern its caches; see `SchedulerConfig`."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def other_groups(self) -> tuple[CacheGroup, ...]: ...


class _Group(NamedTuple):
    rule: RuleOfBlocks
    pool: BlockPool


class CacheManager:
    """Allocates blocks and rows of states to requests, and finds cached prefixes.

    Layers that keep all tokens are the first group. In other groups, a request drops a block as soon as none of its
    uncomputed tokens will read it. The tokens of plans in flight are uncomputed, so no plan reads a dropped block.

    A store behind the cache keeps items of the other groups only where a later request needs them: at positions where
    prompts end or diverge, and where a request ends.
    """

    def __init__(self, config: CacheLimits) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._groups = [_Group(KeepAll(), self.pool)]
        self._rows: StatePool | None = None  # None: no layer of the model has a recurrent state
        self.pools = {kind: BlockPool(0) for kind in CacheKind} | {CacheKind.BLOCK: self.pool}
        for group in config.other_groups:
            if isinstance(group.rule, KeepState):
                self._rows = StatePool(config.max_num_seqs, group.num_places)
                self.pools[group.rule.kind] = self._rows.pool
            else:
                self._groups.append(_Group(group.rule, BlockPool(group.num_places)))
                self.pools[group.rule.kind] = self._groups[-1].pool
        self._rules = [self._groups[0].rule, *(group.rule for group in config.other_groups)]
        # A request can continue a cached prefix after a multiple of this number of blocks.
        self._step = max(rule.step for rule in self._rules)

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds, including those kept for the prefix cache."""
        return self.pool.num_free

    def open(self, root_digest: bytes) -> RequestCache:
        """Return the empty cache of a new request."""
        return RequestCache(root_digest, len(self._groups))

    def find(self, request: CachedRequest, is_stored: Callable[[ItemKey], bool] | None = None) -> Prefix:
        """Return the longest prefix of a request that the caches have.

        The prefix never includes the last token of the request, which is always computed.

        Args:
            is_stored: returns True if an item can be loaded from a store. Such items count as cached.
        """

        def has(key: ItemKey) -> bool:
            return self._is_cached(key) or (is_stored is not None and is_stored(key))

        return self._usable(request, has, self.most_cached_blocks(request))

    def note_branch(self, request: CachedRequest, prefix: Prefix) -> None:
        """Remember the branch point of a prefix, so that later requests can continue there."""
        request.cache.branch_point = max(request.cache.branch_point, prefix.branch_point)

    def prefix_for_others(self, request: CachedRequest) -> list[ItemKey]:
        """Return the items of the longest cached prefix that requests with the same prompt can use."""
        most = (request.num_prompt_tokens - 1) // self.config.block_size
        for index in range(most):  # another block with the same tokens may have been registered instead, and evicted
            digest = self._digest(request, index)
            for group, table, num_dropped in self._held(request):
                if index >= num_dropped and group.pool.find(digest) is None:
                    group.pool.register(table[index], digest)
        prefix = self._usable(request, self._is_cached, most)
        self.note_branch(request, prefix)
        return self.items_of(request, prefix.num_blocks)

    def items_of(self, request: CachedRequest, num_blocks: int) -> list[ItemKey]:
        """Return all items that a request needs to continue after its first `num_blocks` blocks, by group."""
        return [
            ItemKey(rule.kind, self._digest(request, index))
            for rule in self._rules
            for index in rule.needed(num_blocks)
        ]

    def most_cached_blocks(self, request: CachedRequest) -> int:
        """Return the maximum number of blocks that a request may reuse. The request's last token is always computed."""
        if not self.config.enable_prefix_caching or request.needs_every_prompt_row:
            return 0
        return (len(request.token_ids) - 1) // self.config.block_size

    def has_room(self, request: CachedRequest, prefix: Prefix, num_promised: int, num_running: int) -> bool:
        """Return True if all known tokens of a request fit, leaving one block for each running request to grow.

        In groups that do not keep all tokens, only the longest possible chunk must fit.

        Args:
            prefix: the cached blocks of the request.
            num_promised: number of blocks that running requests still need for their known tokens.
        """
        size = self.config.block_size
        (_, shared), *others = self._blocks_of(request, prefix)
        num_shared = sum(not self.pool.is_free(block_id) for block_id in shared)
        if self.num_missing_blocks(request) - num_shared + num_promised + num_running > self.pool.num_free:
            return False
        num_tokens = min(len(request.token_ids) - prefix.num_blocks * size, self.config.max_num_batched_tokens)
        num_needed = num_blocks_for(num_tokens, size) + num_running
        return all(sum(map(pool.is_free, shared)) + num_needed <= pool.num_free for (_, pool), shared in others)

    def num_missing_blocks(self, request: CachedRequest) -> int:
        """Return the number of additional blocks that the known tokens of a request need."""
        return max(num_blocks_for(len(request.token_ids), self.config.block_size) - request.cache.num_blocks, 0)

    def start(self, request: CachedRequest, prefix: Prefix) -> ToStore:
        """Give a cached prefix to a request that has no blocks yet. Its first chunk begins after the prefix.

        Return the prefix's items of all groups except the first, because other requests may continue after this prefix.
        """
        cache = request.cache
        for index, (group, shared) in enumerate(self._blocks_of(request, prefix)):
            group.pool.share(shared)
            cache.num_dropped[index] = prefix.num_blocks - len(shared)
            cache.tables[index] = [0] * cache.num_dropped[index] + shared
        cache.num_positions = prefix.num_blocks * self.config.block_size
        if self._rows is not None and prefix.num_blocks:  # the row is held until the request's first plan has ended
            cache.row = self._rows.read(self._digest(request, prefix.num_blocks - 1))
        return self.items_of(request, prefix.num_blocks)[prefix.num_blocks :]

    def fits(self, request: CachedRequest, num_tokens: int) -> bool:
        """Return True if enough blocks are free for the next tokens of a request."""
        num_new = self._num_new_blocks(request, num_tokens)
        return not num_new or all(num_new <= pool.num_free for _, pool in self._groups)

    def extend(self, request: CachedRequest, num_tokens: int) -> NewBlocks:
        """Allocate and return the new blocks that the next tokens of a request need. `fits` must have returned True."""
        num_new, cache, end = self._num_new_blocks(request, num_tokens), request.cache, request.num_planned + num_tokens
        if end > cache.num_positions:
            cache.num_positions = end
        if not num_new:
            return []
        added = [pool.allocate(num_new) for _, pool in self._groups]
        for table, block_ids in zip(cache.tables, added, strict=True):
            table += block_ids
        return added

    def register(self, request: CachedRequest) -> CacheStart:
        """Return the block tables and the state with which ranks start a request, after it has been given a slot."""
        cache = request.cache
        cache.own_row = request.slot
        return CacheStart(tables=[table.copy() for table in cache.tables], row=cache.row)  # the tables may grow

    def plan_chunk(self, request: CachedRequest, num_tokens: int, num_drafts: int) -> ChunkItems:
        """Return the states that a chunk of a registered request reads and writes, and the request's number of blocks.

        Args:
            num_tokens: tokens of the chunk, without drafts.
        """
        cache, rows = request.cache, self._rows
        if rows is None:
            return ChunkItems(cache.num_blocks)
        if num_drafts:  # a draft may be rejected
            saved: SavedState | None = SavedState(request.slot, rows.other_row(request.slot, cache.own_row), num_tokens)
        else:
            saved = self._save_for_others(request, num_tokens, rows)
        items = ChunkItems(
            cache.num_blocks,
            moved_row=cache.own_row if cache.has_moved else None,
            read_row=cache.row if cache.row in rows.rows else None,
            saved=saved,
            is_for_others=not num_drafts,
        )
        cache.row, cache.has_moved = cache.own_row, False
        return items

    def changes(
        self, new_blocks: Sequence[tuple[int, NewBlocks]], chunks: Sequence[tuple[int, ChunkItems]]
    ) -> CacheChanges:
        """Return the changes that a plan makes to the ranks' tables.

        Args:
            new_blocks: slots of registered requests, and their new blocks.
            chunks: slot and items of each chunk.
        """
        return CacheChanges(
            new_blocks=list(new_blocks),
            moved_rows=[(slot, items.moved_row) for slot, items in chunks if items.moved_row is not None],
            saved_states=[items.saved for _, items in chunks if items.saved is not None],
        )

    def end_chunk(self, request: CachedRequest, items: ChunkItems, start: int, *, is_kept: bool) -> ToStore:
        """Make the state that a chunk has saved available to other requests, and release the state that it read.

        Args:
            start: position of the chunk's first token.
            is_kept: False if the state was not computed.
        """
        if self._rows is None:
            return []
        if items.read_row is not None:
            self._rows.release(items.read_row)
        if items.saved is None or not items.is_for_others:
            return []
        if not is_kept:
            self._rows.release(items.saved.row)
            return []
        digest = self._digest(request, (start + items.saved.num_tokens) // self.config.block_size - 1)
        self._rows.register(items.saved.row, digest)
        return [ItemKey(CacheKind.STATE, digest)]

    def undo_drafts(self, request: CachedRequest) -> bool:
        """Restore the state before a request's drafts, after a draft was rejected.

        Return False if the model has no states.
        """
        if self._rows is None:
            return False
        cache = request.cache
        cache.row = cache.own_row = self._rows.other_row(request.slot, cache.own_row)
        cache.has_moved = True
        return True

    def end_tokens(self, request: CachedRequest, num_tokens: int) -> ToStore:
        """Let other requests find the blocks that new tokens have filled, and drop blocks that no later token reads.

        Args:
            num_tokens: number of newly computed tokens, which `request.num_computed` includes.
        """
        size, to_store = self.config.block_size, []
        if self._is_shared(request):
            for index in range((request.num_computed - num_tokens) // size, request.num_computed // size):
                digest = self._digest(request, index)
                for group, table, _ in self._held(request):
                    group.pool.register(table[index], digest)
                    if group.pool is self.pool or self._is_likely(request, group, index):
                        to_store.append(ItemKey(group.rule.kind, digest))
        if len(self._groups) > 1:
            self._drop_unneeded(request)
        return to_store

    def release(self, request: CachedRequest) -> ToStore:
        """Free the blocks of a request. Return the items that a continuation needs, of all groups except the first."""
        held = self._held(request)
        for group, table, num_dropped in held:
            group.pool.release(table[num_dropped:])
        if len(held) > 1 and self._rows is None and self._is_shared(request):  # states are saved in prompts
            num_blocks = min(request.num_computed, len(request.token_ids)) // self.config.block_size
            return [key for key in self.items_of(request, num_blocks)[num_blocks:] if self._is_cached(key)]
        return []

    def make_private(self, request: CachedRequest) -> None:
        """Share nothing that a request computes from now on with other requests."""
        request.cache.is_private = True

    def clear(self, request: CachedRequest) -> None:
        """Forget the released blocks and the released state of a request, so that the request can start again."""
        request.cache.clear()

    def check_invariants(
        self,
        holders: Sequence[CachedRequest],
        of_transfers: Sequence[CachePlace],
        chunks: Sequence[ChunkItems],
    ) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent.

        Args:
            holders: requests that hold blocks.
            of_transfers: places held by transfers.
            chunks: items of the chunks of plans in flight.
        """
        held: dict[CacheKind, list[int]] = {kind: [] for kind in CacheKind}
        for place in of_transfers:
            held[place.kind].append(place.index)
        for request in holders:
            for group, table, num_dropped in self._held(request):
                held[group.rule.kind] += table[num_dropped:]
        for group in self._groups:
            group.pool.check_invariants(held[group.rule.kind])
        for request in holders:
            assert request.num_planned <= request.cache.num_positions, request
            for group, table, num_dropped in self._held(request):
                assert len(table) == num_blocks_for(request.cache.num_positions, self.config.block_size), request
                first = group.rule.first_kept(request.num_computed)
                assert request.ended or num_dropped == first or not table, request
        if self._rows is not None:
            saved = [items.saved.row for items in chunks if items.saved is not None and items.is_for_others]
            read = [items.read_row for items in chunks if items.read_row is not None]
            self._rows.check_invariants(saved + read, held[CacheKind.STATE])

    def _is_shared(self, request: CachedRequest) -> bool:
        return self.config.enable_prefix_caching and not request.cache.is_private

    def _held(self, request: CachedRequest) -> list[tuple[_Group, list[int], int]]:
        """Return each group with the request's table and the number of blocks that the request has dropped."""
        return list(zip(self._groups, request.cache.tables, request.cache.num_dropped, strict=True))

    def _blocks_of(self, request: CachedRequest, prefix: Prefix) -> list[tuple[_Group, list[int]]]:
        """Return each group with the cached blocks that a request needs to continue after a prefix."""
        digests = [self._digest(request, index) for index in range(prefix.num_blocks)]
        return [
            (group, [group.pool.block_of(digests[index]) for index in group.rule.needed(prefix.num_blocks)])
            for group in self._groups
        ]

    def _drop_unneeded(self, request: CachedRequest) -> None:
        """Free the blocks of a request that none of its uncomputed tokens will read."""
        for index, (group, table, num_dropped) in enumerate(self._held(request)):
            first = group.rule.first_kept(request.num_computed)
            for block in range(num_dropped, first):
                group.pool.release([table[block]], is_unlikely=not self._is_likely(request, group, block))
            request.cache.num_dropped[index] = max(first, num_dropped)

    def _is_likely(self, request: CachedRequest, group: _Group, index: int) -> bool:
        """Return True if a block is needed at a position where later requests are likely to continue.

        These positions are the end of the cached prefix that this request shared, the position where its tokens diverge
        from an earlier request, and the end of its prompt.
        """
        size = self.config.block_size
        end_of_prompt = (request.num_prompt_tokens - 1) // (self._step * size) * self._step
        return any(index in group.rule.needed(end) for end in (request.cache.branch_point // size, end_of_prompt))

    def _save_for_others(self, request: CachedRequest, num_tokens: int, rows: StatePool) -> SavedState | None:
        """Allocate a row for a state within a chunk of a prompt, at the branch point or the last possible position."""
        if num_tokens == 1 or not self._is_shared(request):
            return None
        size, branch_point = self.config.block_size, request.cache.branch_point
        start, end = request.num_planned, request.num_planned + num_tokens
        last = end - end % (self._step * size)
        position = branch_point if start < branch_point <= end else last
        if position <= start or rows.has(self._digest(request, position // size - 1)):
            return None
        row = rows.take()
        return None if row is None else SavedState(request.slot, row, position - start)

    def _num_new_blocks(self, request: CachedRequest, num_tokens: int) -> int:
        """Return the number of new blocks for the next tokens of a request. Blocks of rejected drafts are reused."""
        num_blocks = num_blocks_for(request.num_planned + num_tokens, self.config.block_size)
        return max(num_blocks - request.cache.num_blocks, 0)

    def _digest(self, request: CachedRequest, index: int) -> bytes:
        return request.cache.digest(request.token_ids, index, self.config.block_size)

    def _is_cached(self, key: ItemKey) -> bool:
        return self.pools[key.kind].find(key.digest) is not None

    def _usable(self, request: CachedRequest, has: Callable[[ItemKey], bool], most: int) -> Prefix:
        """Return the longest prefix of at most `most` blocks after which a request can continue.

        All items that the next token needs must be available.

        Args:
            has: returns True if an item is available.
        """

        def of(rule: RuleOfBlocks | KeepState) -> Has:
            return lambda index: has(ItemKey(rule.kind, self._digest(request, index)))

        first, *others = self._rules
        end = first.usable(most, of(first))
        branch = end = end - end % self._step
        before = None
        while end != before:
            before = end
            for rule in others:
                end = rule.usable(end, of(rule))
        return Prefix(end, branch * self.config.block_size)
