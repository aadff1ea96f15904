"""`BytesInFlight`: one budget, for all connections, of the bytes of requests that arrive or are parsed."""

from __future__ import annotations

from collections.abc import Callable

from moeserve.server.errors import ApiError


class BytesInFlight:
    """Counts the bytes of requests that arrive or are parsed. Beyond a maximum, the largest unfinished request ends."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.unfinished: set[Holding] = set()


class Holding:
    """The bytes that one request holds. They count against the budget until `release` is called."""

    def __init__(self, budget: BytesInFlight, refuse: Callable[[ApiError], None]) -> None:
        """
        Args:
            refuse: ends the request with an error, because it holds the most bytes of all unfinished requests.
        """
        self._budget, self._refuse = budget, refuse
        self.num_bytes = 0
        budget.unfinished.add(self)

    def grow(self, num_bytes: int) -> None:
        """Add bytes to this request.

        Raises:
            ApiError: the budget is exceeded, and no other unfinished request holds more bytes than this one.
        """
        budget = self._budget
        self.num_bytes += num_bytes
        budget.num_bytes += num_bytes
        while budget.num_bytes > budget.max_bytes:
            largest = max(budget.unfinished, key=lambda each: each.num_bytes, default=self)
            error = ApiError(
                503,
                f"requests in flight hold more than {budget.max_bytes} bytes; try again later",
                headers={"Retry-After": "1", "Connection": "close"},
            )
            if largest.num_bytes <= self.num_bytes:
                self.release()
                raise error
            largest.release()
            largest._refuse(error)

    def finish(self) -> None:
        """Note that the request has arrived completely. From now on, no other request can end it."""
        self._budget.unfinished.discard(self)

    def release(self) -> None:
        """Return the request's bytes to the budget."""
        self.finish()
        self._budget.num_bytes -= self.num_bytes
        self.num_bytes = 0
