"""Bookkeeping of the KV cache's blocks: their holders, the free list, and the blocks that can be shared."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Allocates block ids, counts their holders, and finds full blocks by digest.

    A block without holders is free. A registered block keeps its digest while it is free and can be shared again,
    until it is allocated for something else. Every operation takes constant time per block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_holders = [0] * num_blocks
        # In the order of allocation: blocks without a digest, then the least recently used digest first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # Blocks whose digest will hardly be found again, in the order of their release. They are allocated before all
        # other blocks with a digest.
        self._unlikely: OrderedDict[int, None] = OrderedDict()
        self._block_of_digest: dict[bytes, int] = {}
        self._digest_of_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._unlikely)

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free or block_id in self._unlikely

    def num_holders(self, block_id: int) -> int:
        return self._num_holders[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks off the free list for one holder, and evict the digests of these blocks."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks needed, {self.num_free} free"
        taken = [self._take_free() for _ in range(num_blocks)]
        for block_id in taken:
            self._num_holders[block_id] = 1
            digest = self._digest_of_block.pop(block_id, None)
            if digest is not None:
                del self._block_of_digest[digest]
        return taken

    def find(self, digest: bytes) -> int | None:
        """Return the block registered under a digest, or None.

        The block may be free, so `share` it before the next allocation.
        """
        return self._block_of_digest.get(digest)

    def block_of(self, digest: bytes) -> int:
        """Return the block registered under a digest. The digest must be registered."""
        return self._block_of_digest[digest]

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a holder to blocks that are registered or held."""
        for block_id in block_ids:
            if self._num_holders[block_id] == 0:
                assert block_id in self._digest_of_block, f"block {block_id} is neither registered nor held"
                del (self._free if block_id in self._free else self._unlikely)[block_id]
            self._num_holders[block_id] += 1

    def release(self, block_ids: Sequence[int], *, is_unlikely: bool = False) -> None:
        """Remove one holder from each block of a request. The blocks are given in the order of their positions.

        The last block is freed first, so that a cached prefix is evicted from its tail. Without its head, the tail
        could not be found.

        Args:
            is_unlikely: the blocks will hardly be shared again, so evict them before others.
        """
        for block_id in reversed(block_ids):
            assert self._num_holders[block_id] > 0, f"block {block_id} is released, but has no holder"
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0:
                has_digest = block_id in self._digest_of_block
                (self._unlikely if is_unlikely and has_digest else self._free)[block_id] = None
                if not has_digest:
                    self._free.move_to_end(block_id, last=False)

    def register(self, block_id: int, digest: bytes) -> None:
        """Make a full, computed block shareable, unless a block with the same contents is registered already."""
        assert self._num_holders[block_id] > 0, f"block {block_id} is registered, but has no holder"
        assert block_id not in self._digest_of_block, f"block {block_id} is registered twice"
        if digest not in self._block_of_digest:
            self._block_of_digest[digest] = block_id
            self._digest_of_block[block_id] = digest

    def check_invariants(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless `held`, the blocks of all live requests, equals the blocks in use."""
        holders = Counter(held)
        assert self._num_holders == [holders[block_id] for block_id in range(self.num_blocks)], "holders are miscounted"
        unheld = {block_id for block_id in range(self.num_blocks) if not holders[block_id]}
        assert {*self._free, *self._unlikely} == unheld, "a block is lost, or free while it is held"
        blocks_and_digests = {(block_id, digest) for digest, block_id in self._block_of_digest.items()}
        assert blocks_and_digests == set(self._digest_of_block.items()), "the prefix cache contradicts itself"

    def _take_free(self) -> int:
        first = next(iter(self._free), None)
        if self._unlikely and (first is None or first in self._digest_of_block):
            return self._unlikely.popitem(last=False)[0]
        return self._free.popitem(last=False)[0]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold this number of tokens. The last block may be partly full."""
    return -(-num_tokens // block_size)


def num_blocks_of_windows(window: int, block_size: int, *, max_num_seqs: int, num_tokens_in_flight: int) -> int:
    """Return the number of blocks that the windows of all running requests and the chunks of plans in flight need.

    The first and the last block of a window may be partly outside the window, and another block may be allocated before
    the results of plans in flight are known.
    """
    num_chunk_blocks = num_blocks_for(num_tokens_in_flight, block_size)
    return max_num_seqs * (num_blocks_for(window, block_size) + 2) + num_chunk_blocks


def root_digest(engine_salt: bytes, cache_salt: str) -> bytes:
    """Return the parent digest of a request's first block. Tenants with different salts share no cached blocks.

    Each salt is hashed with its length, so no two pairs of salts give the same bytes.
    """
    parts = (engine_salt, cache_salt.encode("utf-8", "surrogatepass"))
    return hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()


def block_digests(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return a SHA-256 digest for each full block, computed from the previous digest and the block's tokens.

    Digests are equal only for equal prefixes.

    Args:
        parent: digest of everything before these tokens.
    """
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    size = 8 * block_size
    digests = []
    for end in range(size, len(packed) + 1, size):
        parent = hashlib.sha256(parent + packed[end - size : end]).digest()
        digests.append(parent)
    return digests


def tokens_digest(token_ids: Sequence[int]) -> bytes:
    """Return the SHA-256 digest of tokens. It has no salt, so it is the same in all engines."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()
