"""Requests that wait for the engine: a bounded queue, shared fairly between clients."""

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
RATE_WINDOW = 64  # ends of outputs over which their rate is measured


class Admission:
    """Admits as many outputs as the engine can run at once. Others wait, and clients get equal shares of the room.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996): a client's next request is tagged with the outputs that it
    had since clients began to wait, and the lowest tag is next. A new client's tag is the tag that was served last.
    """

    def __init__(self, max_running: Callable[[], int], max_waiting: int) -> None:
        """
        Args:
            max_running: returns how many outputs run at most before further requests wait. A request is admitted with
                all of its outputs.
            max_waiting: most outputs that wait.
        """
        self._max_running, self._max_waiting = max_running, max_waiting
        self.num_running = 0
        self.num_waiting = 0
        # By client, in the order of their last turns. Clients without a waiting request are not listed.
        self._queues: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._tags: dict[str, int] = {}  # of each client's next request
        self._served_tag = 0
        self._ends: deque[float] = deque(maxlen=RATE_WINDOW)
        self.is_closed = False
        self.waits = Histogram.empty(LONG_S)

    @property
    def max_outputs(self) -> int:
        """Most outputs that run or wait."""
        return self._max_running() + self._max_waiting

    @contextlib.asynccontextmanager
    async def admitted(self, client: str, num_outputs: int) -> AsyncIterator[None]:
        """Wait for room, and hold it within the context.

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
        """Raise ApiError if too many outputs wait for a request to join them."""
        if self.num_waiting + num_outputs > self._max_waiting and self.num_waiting:
            raise ApiError(
                429,
                f"{self.num_waiting} outputs wait for the engine, and at most {self._max_waiting} may; try again later",
                code="queue_full",
                headers={"Retry-After": str(self._retry_after_s())},
            )

    def close(self) -> None:
        """Refuse further requests, and those that wait."""
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
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # admitted, and cancelled since
                self.num_running -= num_outputs
            else:
                self._queues[client].remove(waiting)
                self.num_waiting -= num_outputs
                if not self._queues[client]:
                    del self._queues[client]
            self.admit_waiting()
            raise

    def admit_waiting(self) -> None:
        """Admit waiting requests, each of the client with the lowest tag, while there is room."""
        while self._queues and self._has_room():
            client = min(self._queues, key=self._tags.__getitem__)
            queue = self._queues[client]
            num_outputs, turn = queue[0]
            if turn.done():  # cancelled: its task removes it
                return
            queue.popleft()
            self._served_tag = self._tags[client]
            self._tags[client] += num_outputs
            self.num_waiting -= num_outputs
            self.num_running += num_outputs
            del self._queues[client]
            if queue:
                self._queues[client] = queue  # behind others with the same tag
            turn.set_result(None)

    def _has_room(self) -> bool:
        return self.num_running < self._max_running()

    def _retry_after_s(self) -> int:
        """Return the seconds in which about half of the queue is served, at the rate at which outputs ended lately."""
        if len(self._ends) < 2:
            return 1
        rate = (len(self._ends) - 1) / max(time.monotonic() - self._ends[0], 1e-3)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(self.num_waiting / 2 / rate)))
