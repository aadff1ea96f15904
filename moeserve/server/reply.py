"""`Reply`: a response that is sent while it is generated. Generation stops if the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moeserve.server.errors import ApiError, PromptKept

logger = logging.getLogger(__name__)

T = TypeVar("T")
JSON = "application/json"
EVENTS = "text/event-stream"
# Seconds of silence after which a stream's headers are sent, and seconds between pings.
SECONDS_TO_HEADERS, SECONDS_BETWEEN_PINGS = 1.0, 10.0
# Blank lines, which form no event. Comments would make some clients, such as `vllm bench serve`, lose later events.
PING = b"\n\n"
encode_json = msgspec.json.Encoder().encode


def event(data: Any, name: str | None = None) -> bytes:
    """Return a server-sent event with JSON data."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode_json(data) + b"\n\n"


class Reply(Response):
    """A response made of chunks.

    The headers are sent with the first chunk. So an error before the first chunk is sent with its own status. A later
    error is sent as the last event. After a second without a chunk, a stream begins nevertheless. While a stream is
    silent, pings are sent, because clients and proxies close connections on which no bytes arrive.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        media_type: str,
        *,
        error_body: Callable[[ApiError], Any] = lambda error: error.body,
        error_event: Callable[[ApiError], bytes] = lambda error: event(error.body),
        ping: bytes = PING,
        seconds_to_headers: float = SECONDS_TO_HEADERS,
        seconds_between_pings: float = SECONDS_BETWEEN_PINGS,
    ) -> None:
        """
        Args:
            chunks: the chunks; the generator is closed if the client disconnects.
            media_type: `JSON` or `EVENTS`.
            error_body: returns the body of an error before the first chunk.
            error_event: returns the event for a later error.
            ping: bytes that are sent in a silent stream.
            seconds_to_headers: time after which a stream begins without a chunk.
            seconds_between_pings: silence after which `ping` is sent.
        """
        super().__init__(media_type=media_type)
        self._chunks, self._error_body, self._error_event = chunks, error_body, error_event
        self._ping, self._seconds_to_headers = ping, seconds_to_headers
        self._seconds_between_pings = seconds_between_pings
        self._num_sent = 0  # messages of the response that were sent, including its headers
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            send_all = self._send_with_pings if self.media_type == EVENTS else self._send
            await until_hang_up(asyncio.create_task(send_all(scope, receive, send)), receive)
        finally:
            await self._chunks.aclose()

    async def _send_with_pings(self, scope: Scope, receive: Receive, send: Send) -> None:
        pings = asyncio.create_task(self._send_pings(send))
        try:
            await self._send(scope, receive, send)
        finally:
            pings.cancel()

    async def _send_pings(self, send: Send) -> None:
        await asyncio.sleep(self._seconds_to_headers)
        num_seen = 0
        while True:
            if self._num_sent == num_seen and not self._is_sending:
                await self._send_chunk(send, self._ping)
            num_seen = self._num_sent
            await asyncio.sleep(self._seconds_between_pings)

    async def _send_chunk(self, send: Send, chunk: bytes) -> None:
        """Send a chunk. Before the first chunk, send the headers."""
        self._is_sending = True
        if not self._num_sent:
            self._num_sent = 1
            await send({"type": "http.response.start", "status": 200, "headers": self._event_headers()})
        self._num_sent += 1
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_sending = False

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError):  # the client has disconnected
                async for chunk in self._chunks:
                    await self._send_chunk(send, chunk)
                self._is_sending = True  # send no ping after the end
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        except PromptKept as kept:  # raised before any chunk; there is nothing to stream
            self._is_sending = True
            if self._num_sent:
                await send({"type": "http.response.body", "body": event(kept.body), "more_body": False})
                return
            await Response(encode_json(kept.body), media_type=JSON)(scope, receive, send)
            return
        except ApiError as error:
            failure = error
        except Exception:
            logger.exception("a request failed")
            failure = ApiError(500, "the request failed; the server's log says why")
        self._is_sending = True
        if not self._num_sent:
            body = self._error_body(failure)
            await Response(encode_json(body), failure.status, failure.headers, JSON)(scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": self._error_event(failure), "more_body": False})

    def _event_headers(self) -> list[tuple[bytes, bytes]]:
        assert self.media_type is not None
        no_cache = [(b"cache-control", b"no-cache")] if self.media_type == EVENTS else []
        return [(b"content-type", self.media_type.encode()), *no_cache]


async def until_hang_up(sending: asyncio.Task[None], receive: Receive) -> None:
    """Wait for a task, and raise its exception. Cancel the task if the client disconnects."""
    hang_up = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait({sending, hang_up}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, hang_up):
            task.cancel()
        await asyncio.gather(sending, hang_up, return_exceptions=True)
    if not sending.cancelled():
        sending.result()


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(iterators: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of several iterators as they arrive, each with the index of its iterator.

    The first error of an iterator is raised, and ends all iterators.
    """
    if len(iterators) == 1:  # avoid a task and a queue, which would take as long as the rest of an event
        async with contextlib.aclosing(iterators[0]) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def forward(index: int, iterator: AsyncGenerator[T, None]) -> None:
        try:
            async for item in iterator:
                queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(index, iterator)) for index, iterator in enumerate(iterators)]
    try:
        num_open = len(tasks)
        while num_open:
            arrived = await queue.get()
            if isinstance(arrived, BaseException):
                raise arrived
            if arrived is None:
                num_open -= 1
            else:
                yield arrived
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
