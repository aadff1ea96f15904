"""The part of the caches that one request holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from moeserve.kv.pool import block_digests


@dataclass(eq=False)
class RequestCache:
    """The blocks and the state of one request. Only the cache manager changes this object."""

    root_digest: bytes
    num_tables: int = 1  # number of groups of layers with blocks
    tables: list[list[int]] = field(init=False)  # by group: the block of each position; all have the same length
    num_dropped: list[int] = field(init=False)  # by group: number of leading blocks that the request no longer holds
    num_positions: int = 0  # positions for which the request has blocks, including those of drafts that were rejected
    row: int | None = None  # row of the state before the next planned token; None: zeros
    own_row: int = -1  # row to which a chunk of the registered request writes its final state
    has_moved: bool = False  # the state has moved to `own_row` since the last plan
    # keys and values are of several versions of the weights, so no other request may find them
    is_private: bool = False
    # position where another request diverged; the items that a later request needs there are kept
    branch_point: int = 0
    _digests: list[bytes] = field(default_factory=list)  # digests of the first full blocks, computed on demand

    def __post_init__(self) -> None:
        self.clear()

    @property
    def num_blocks(self) -> int:
        """Number of blocks in each table."""
        return len(self.tables[0])

    def clear(self) -> None:
        """Forget all blocks and the state, but not what is known about the request's tokens."""
        self.tables = [[] for _ in range(self.num_tables)]
        self.num_dropped = [0] * self.num_tables
        self.num_positions = 0
        self.row, self.has_moved = None, False

    def digest(self, token_ids: list[int], block_index: int, block_size: int) -> bytes:
        """Return the digest of a full block of the request's known tokens. Digests are cached."""
        assert (block_index + 1) * block_size <= len(token_ids), f"block {block_index} is not full"
        if block_index >= len(self._digests):
            parent = self._digests[-1] if self._digests else self.root_digest
            self._digests += block_digests(parent, token_ids[len(self._digests) * block_size :], block_size)
        return self._digests[block_index]


class CachedRequest(Protocol):
    """The part of a request that the cache manager reads."""

    @property
    def cache(self) -> RequestCache: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def num_planned(self) -> int: ...
    @property
    def needs_every_prompt_row(self) -> bool: ...
    @property
    def slot(self) -> int: ...
    @property
    def ended(self) -> bool: ...
