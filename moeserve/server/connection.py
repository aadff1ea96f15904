"""`Connection`: a client's HTTP connection. The head of a request is limited in bytes and time.

uvicorn parses with httptools, which does not limit URLs, headers, trailers and chunk extensions. Therefore this class
counts the bytes that are not the body of a request.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from moeserve.server.bytes_in_flight import BytesInFlight, Holding
from moeserve.server.errors import ApiError, error_answer

MAX_HEAD_BYTES = 64 * 2**10  # bytes of request line and headers, and of trailers
MAX_HEADERS = 256
MAX_IN_PIPELINE, MAX_BYTES_IN_PIPELINE = 16, 64 * 2**10  # requests that may arrive before the previous one is answered
MAX_DISCARDED_BYTES = 64 * 2**20  # bytes of a body that arrive after the request was answered
HEAD_TIMEOUT_S = 60.0  # from a connection's beginning, or a later request's first byte, to the end of the head
UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")


class _Refused(Exception):
    """A parser's callback has found a head that is too large."""

    def __init__(self, error: ApiError) -> None:
        super().__init__()
        self.error = error


class Connection(HttpToolsProtocol):
    """A client's connection.

    Three rules differ from uvicorn's. Heads have limits. An offer to upgrade to another protocol is ignored, and the
    request is served. A disconnected client is noticed even if it has already sent a further request.
    """

    def __init__(
        self, budget: BytesInFlight, head_timeout_s: float = HEAD_TIMEOUT_S, *args: Any, **options: Any
    ) -> None:
        """
        Args:
            budget: budget for the bytes of unfinished heads.
            args, options: arguments of uvicorn's class.
        """
        super().__init__(*args, **options)
        self._budget, self._head_timeout_s = budget, head_timeout_s
        self._holding: Holding | None = None  # bytes of an unfinished head
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._is_upgrade = False  # the request offers to upgrade; its head is parsed again without the offer
        self._head_bytes = 0  # bytes of the complete request line, headers and trailers
        self._bytes_in_part = 0  # bytes received since the parser completed a head or a piece of the body
        self._discarded_bytes = 0
        self._bytes_in_pipeline = 0
        self._running: RequestResponseCycle | None = None  # the request that the application is answering

    # Methods that the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._release()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True  # uvicorn notifies only the request that came last
            running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if self._head_timer is None and self._is_in_head:
            self._start_head_timer()
        if self.pipeline:
            self._bytes_in_pipeline += len(data)
            if self._bytes_in_pipeline > MAX_BYTES_IN_PIPELINE:
                self.transport.abort()
                return
        self._bytes_in_part += len(data)
        try:
            self._feed(data)
            if self._bytes_in_part > MAX_HEAD_BYTES:
                raise _Refused(_head_too_large())
            self._hold()
        except _Refused as refused:
            self._refuse(refused.error)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, _Refused):
                raise error.__context__ from None
            raise _Refused(_malformed()) from None
        except httptools.HttpParserError:
            raise _Refused(_malformed()) from None

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Parse a request again, without its offer to upgrade the connection to another protocol."""
        if not self._is_upgrade:  # the method CONNECT
            raise _Refused(_malformed())
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % each for each in self.headers if each[0] not in UPGRADE_HEADERS]
        self._is_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"\r\n".join([*lines, b"", b""]) + rest)

    # Methods that the parser calls.

    def on_message_begin(self) -> None:
        self._is_in_head, self._is_upgrade = True, False
        self._head_bytes = self._discarded_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._add_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._add_head_bytes(len(name) + len(value) + 4)
        if not self._is_in_head:  # a trailer, which no endpoint uses
            return
        if len(self.headers) == MAX_HEADERS:
            raise _Refused(ApiError(431, f"the request has more than {MAX_HEADERS} headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_bytes = self._bytes_in_part = 0
        self._stop_head_timer()
        self._release()
        if self.parser.should_upgrade() and self._get_upgrade() is not None:
            self._is_upgrade = True
            return
        try:
            super().on_headers_complete()
        except (httptools.HttpParserError, UnicodeDecodeError):
            raise _Refused(_malformed()) from None
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = functools.partial(_send_unframed, self.cycle, self.cycle.send)  # type: ignore[method-assign]
        if len(self.pipeline) > MAX_IN_PIPELINE:
            raise _Refused(
                ApiError(400, f"more than {MAX_IN_PIPELINE} requests wait for the response to an earlier one")
            )
        self.flow.resume_reading()  # so that the end of the connection is noticed

    def on_body(self, body: bytes) -> None:
        self._bytes_in_part = 0
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        super().on_body(body)
        if self.pipeline:
            self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        self._bytes_in_part = 0

    def on_message_complete(self) -> None:
        self._bytes_in_part = 0
        if self._is_upgrade:
            return
        self._is_in_head = True
        super().on_message_complete()

    # Methods that uvicorn calls.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._bytes_in_pipeline = 0
        super()._start_asgi_task(cycle, app)

    def _add_head_bytes(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _Refused(_head_too_large())

    def _hold(self) -> None:
        """Count the bytes of an unfinished head against the budget."""
        if not self._is_in_head or not self._bytes_in_part:
            return
        if self._holding is None:
            self._holding = Holding(self._budget, self._refuse)
        try:
            self._holding.grow(self._bytes_in_part - self._holding.num_bytes)
        except ApiError as error:
            raise _Refused(error) from None

    def _release(self) -> None:
        if self._holding is not None:
            self._holding.release()
            self._holding = None

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._end_late_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_late_head(self) -> None:
        if not self._bytes_in_part:  # no request has begun
            self.transport.close()
            return
        self._refuse(ApiError(408, f"the request's head did not arrive within {self._head_timeout_s:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Send an error response, unless the application is sending a response. Then close the connection."""
        self._stop_head_timer()
        self._release()
        if self.transport.is_closing():
            return
        if self._running is None or self._running.response_complete:
            answer = error_answer(error, "")
            headers = [*answer.raw_headers, (b"connection", b"close")]
            head = b"HTTP/1.1 %d \r\n" % error.status + b"".join(b"%s: %s\r\n" % each for each in headers)
            self.transport.write(head + b"\r\n" + bytes(answer.body))
        elif not self._running.response_started:
            self._running.disconnected = True
            self._running.message_event.set()
        self.transport.close()


async def _send_unframed(cycle: RequestResponseCycle, send: Any, message: Any) -> None:
    """Send a response to an HTTP/1.0 client, which does not support chunks. Closing the connection ends the body."""
    if message["type"] == "http.response.start":
        if any(name.lower() == b"content-length" for name, _ in message["headers"]):
            cycle.send = send  # type: ignore[method-assign]
            await send(message)
            return
        scope = cycle.scope
        cycle.scope = {**scope, "method": "HEAD"}  # else uvicorn sends chunks
        try:
            await send(message)
        finally:
            cycle.scope = scope
        return
    cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


def _head_too_large() -> ApiError:
    return ApiError(431, f"the head or the trailers of the request have more than {MAX_HEAD_BYTES} bytes")


def _malformed() -> ApiError:
    return ApiError(400, "the request is not valid HTTP/1.1")
