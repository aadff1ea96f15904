"""Bookkeeping of recurrent states: the rows of the state caches and the prefixes whose states they hold.

A layer with a recurrent state has a cache with a row for each running request, at the request's slot, and further rows
for saved states. A saved state is a copy of a request's state after a prefix whose length is a multiple of `interval`
tokens; another request that begins with the same tokens starts from it. Ranks execute plans in order, so a row
can be reused in the plan after the last one that reads it.

A chunk with drafts changes the state of its request in place, and saves the state before them in a second row of the
request. If a draft is rejected, the two rows change their roles.
"""

from __future__ import annotations

from collections import OrderedDict

STATE_INTERVAL = 64  # tokens between the positions where states can be saved, rounded up to whole blocks


class StatePool:
    """Allocates rows for saved states, and finds saved states by the digest of their prefix."""

    def __init__(self, first_row: int, num_rows: int) -> None:
        """
        Args:
            first_row: the number of rows of running requests, which come before those of saved states.
        """
        self.rows = range(first_row, first_row + num_rows)
        self._free = list(reversed(self.rows))
        self._row_of_digest: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pending: set[int] = set()  # written by plans in flight
        self._read: set[int] = set()  # by the plan that is being made

    def other_row(self, slot: int, row: int) -> int:
        """Return the other one of the two rows of the request in a slot."""
        second = self.rows.stop + slot
        return second if row == slot else slot

    def begin_plan(self) -> None:
        """Begin another plan. Rows that the previous plan reads may be reused."""
        self._read.clear()

    def has(self, digest: bytes) -> bool:
        """Return True if the state behind a prefix is saved."""
        return digest in self._row_of_digest

    def read(self, digest: bytes) -> int:
        """Return the row of a saved state for the plan that is being made."""
        self._row_of_digest.move_to_end(digest)
        row = self._row_of_digest[digest]
        self._read.add(row)
        return row

    def take(self) -> int | None:
        """Return a row for a state that the plan saves, evicting the least recently used state if none is free.

        Return None if this plan and those in flight use all rows.
        """
        if self._free:
            row = self._free.pop()
        else:
            oldest = next((digest for digest, row in self._row_of_digest.items() if row not in self._read), None)
            if oldest is None:
                return None
            row = self._row_of_digest.pop(oldest)
        self._pending.add(row)
        return row

    def register(self, row: int, digest: bytes) -> None:
        """Make a saved state available, once the plan that saved it has been committed."""
        self._pending.remove(row)
        if digest in self._row_of_digest:
            self._free.append(row)
        else:
            self._row_of_digest[digest] = row

    def release(self, row: int) -> None:
        """Free a row whose plan has failed, or whose request has ended."""
        self._pending.remove(row)
        self._free.append(row)

    def check_invariants(self, pending: set[int]) -> None:
        """Raise AssertionError unless `pending`, the rows that plans in flight write, accounts for all rows in use."""
        assert self._pending == pending, f"{self._pending} are not {pending}"
        known = [*self._free, *self._row_of_digest.values(), *self._pending]
        assert sorted(known) == list(self.rows), f"rows of states are lost: {known}"
