"""Bookkeeping of recurrent states: the rows of the state caches, and the prefixes of saved states.

A layer with a recurrent state has a cache with a row for each running request, at the request's slot, and additional
rows for saved states. A saved state is a copy of a request's state after a prefix whose length is a multiple of
`interval` tokens. Another request with the same prefix can start from it. The row of a saved state has a holder while a
plan in flight reads or writes it, and while a transfer copies it.

A chunk with drafts changes the state of its request in place, and saves the state before the drafts in a second row of
the request. If a draft is rejected, the two rows are swapped.
"""

from __future__ import annotations

from moeserve.kv.pool import BlockPool

STATE_INTERVAL = 64  # tokens between the positions where states can be saved, rounded up to whole blocks


class StatePool:
    """The allocator of rows for saved states, which also finds saved states by the digest of their prefix."""

    def __init__(self, first_row: int, num_rows: int) -> None:
        """
        Args:
            first_row: number of rows of running requests, which come before the rows of saved states.
        """
        self.pool = BlockPool(num_rows)  # block i is the i-th row of saved states
        self.rows = range(first_row, first_row + num_rows)

    def other_row(self, slot: int, row: int) -> int:
        """Return the other of the two rows of the request in a slot."""
        second = self.rows.stop + slot
        return second if row == slot else slot

    def has(self, digest: bytes) -> bool:
        """Return True if the state after a prefix is saved."""
        return self.pool.find(digest) is not None

    def read(self, digest: bytes) -> int:
        """Return the row of a saved state for a plan that reads it. The row is held until `release`."""
        index = self.pool.block_of(digest)
        self.pool.share([index])
        return self.rows.start + index

    def take(self) -> int | None:
        """Allocate a row for a state that a plan saves, evicting the least recently used state if necessary.

        Return None if plans in flight and transfers use all rows.
        """
        return self.rows.start + self.pool.allocate(1)[0] if self.pool.num_free else None

    def register(self, row: int, digest: bytes) -> int:
        """Make a saved state available after its plan has been committed. Return its index in `pool`."""
        index = row - self.rows.start
        self.pool.register(index, digest)
        self.release(row)
        return index

    def release(self, row: int) -> None:
        """Release a row after the plan that used it has ended or failed."""
        self.pool.release([row - self.rows.start])

    def check_invariants(self, used: list[int], of_transfers: list[int]) -> None:
        """Raise AssertionError unless the rows in use are the rows that plans and transfers in flight use.

        Args:
            used: rows in use, each once for each plan that reads or writes it.
            of_transfers: indices in `pool` of the rows that transfers hold.
        """
        self.pool.check_invariants([*(row - self.rows.start for row in used), *of_transfers])
