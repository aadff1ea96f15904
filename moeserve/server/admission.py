"""The queue of requests that wait for the engine: bounded, and shared fairly between clients."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from moeserve.server.errors import ApiError, shutting_down
from moeserve.telemetry.request_stats import LONG_S, Histogram

MAX_RETRY_AFTER_S = 60
RATE_WINDOW = 64  # number of finished outputs over which the rate of finished outputs is measured


class Admission:
    """Admits as many outputs as the engine can run at once. Others wait, and clients get equal shares of the capacity.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996): the tag of a client's next request is the number of outputs
    that the client was granted since clients began to wait. The lowest tag is served next. A new client starts with the
    tag that was served last.
    """

    def __init__(self, max_running: Callable[[], int], max_waiting: int) -> None:
        """
        Args:
            max_running: returns the maximum number of running outputs. At this number, further requests wait. A request
                is admitted with all of its outputs.
            max_waiting: maximum number of waiting outputs.
        """
        self._max_running, self._max_waiting = max_running, max_waiting
        self.num_running = 0
        self.num_waiting = 0
        # Number of outputs and future of each waiting request, by client. Only clients with waiting requests are
        # listed.
        self._queues: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._tags: dict[str, int] = {}  # the tag of each client's next request
        self._served_tag = 0
        self._ends: deque[float] = deque(maxlen=RATE_WINDOW)
        self.is_closed = False
        self.waits = Histogram.empty(LONG_S)

    @property
    def max_outputs(self) -> int:
        """Maximum number of outputs that run or wait."""
        return self._max_running() + self._max_waiting

    @contextlib.asynccontextmanager
    async def admitted(self, client: str, num_outputs: int) -> AsyncIterator[None]:
        """Wait for capacity, and hold it within the context.

        Raises:
            ApiError: too many outputs wait, or the server is shutting down.
        """
        self.require_open()
        arrival_s = time.monotonic()
        if self._queues or not self._has_room():
            await self._wait(client, num_outputs)
        else:
            self.num_running += num_outputs
        try:
            self.waits.add(time.monotonic() - arrival_s)
            yield
        finally:
            self.num_running -= num_outputs
            self._ends.append(time.monotonic())
            self.admit_waiting()

    def require_open(self) -> None:
        """Raise ApiError if the server is shutting down."""
        if self.is_closed:
            raise shutting_down()

    def require_room(self, num_outputs: int) -> None:
        """Raise ApiError if a request with this many outputs does not fit into the queue."""
        if self.num_waiting + num_outputs > self._max_waiting and self.num_waiting:
            raise ApiError(
                429,
                f"{self.num_waiting} outputs wait for the engine, and at most {self._max_waiting} may; try again later",
                code="queue_full",
                headers={"Retry-After": str(self._retry_after_s())},
            )

    def close(self) -> None:
        """Refuse further requests, and end waiting requests with an error."""
        self.is_closed = True
        for queue in self._queues.values():
            for _, turn in queue:
                if not turn.done():
                    turn.set_exception(shutting_down())

    async def _wait(self, client: str, num_outputs: int) -> None:
        self.require_room(num_outputs)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (num_outputs, turn)
        if client not in self._queues:
            self._queues[client] = deque()
            self._tags[client] = max(self._tags.get(client, 0), self._served_tag)
        self._queues[client].append(waiting)
        self.num_waiting += num_outputs
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # admitted, but then cancelled
                self.num_running -= num_outputs
            else:
                self._queues[client].remove(waiting)
                self.num_waiting -= num_outputs
                if not self._queues[client]:
                    del self._queues[client]
            self.admit_waiting()
            raise

    def admit_waiting(self) -> None:
        """Admit waiting requests while there is capacity, each time one of the client with the lowest tag."""
        while self._queues and self._has_room():
            client = min(self._queues, key=self._tags.__getitem__)
            queue = self._queues[client]
            num_outputs, turn = queue[0]
            if turn.done():  # cancelled; the request's own task removes it
                return
            queue.popleft()
            self._served_tag = self._tags[client]
            self._tags[client] += num_outputs
            self.num_waiting -= num_outputs
            self.num_running += num_outputs
            del self._queues[client]
            if queue:
                self._queues[client] = queue  # move behind other clients with the same tag
            turn.set_result(None)

    def _has_room(self) -> bool:
        return self.num_running < self._max_running()

    def _retry_after_s(self) -> int:
        """Return the estimated seconds until half of the queue is served, at the recent rate of finished outputs."""
        if len(self._ends) < 2:
            return 1
        rate = (len(self._ends) - 1) / max(time.monotonic() - self._ends[0], 1e-3)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(self.num_waiting / 2 / rate)))
