"""Processing of every request before its endpoint: request id, host, API key, limits of the body, and access log."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeserve.processes.logs import log_format
from moeserve.server.bytes_in_flight import BytesInFlight, Holding
from moeserve.server.client import Client
from moeserve.server.content_encoding import inflated
from moeserve.server.errors import ApiError, error_answer
from moeserve.server.hosts import Hosts
from moeserve.server.keys import Keys
from moeserve.server.nesting import require_nesting
from moeserve.server.surrogates import replace_lone_surrogates

access_log = logging.getLogger("moeserve.access")

ACCESS_FORMAT, TIME_FORMAT = "%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"

# Paths that monitors read. They need no key and accept no body.
OPEN_PATHS = frozenset(["/", "/health", "/ready", "/ping", "/version"])
UNLOGGED_PATHS = frozenset(["/health", "/ready", "/ping", "/metrics", "/status"])  # read every few seconds
BODY_TIMEOUT_S = 60.0  # from a request's headers to the end of its body
ALLOWED_ID = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


def start_access_log() -> None:
    """Write the access log to standard error in its own format, unless the process's log is JSON."""
    if log_format() == "json":
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(ACCESS_FORMAT, TIME_FORMAT))
    access_log.handlers = [handler]
    access_log.propagate = False


def _log_access(scope: Scope, status: int, seconds: float, request_id: str) -> None:
    """Log one line about a request.

    Args:
        status: status of the response; 0: the client disconnected before the response.
    """
    fields = {
        "client": (scope.get("client") or ["-"])[0],
        "method": scope["method"],
        "path": quote(scope["path"]),  # so that a newline in the path cannot forge a log line
        "status": status or None,
        "seconds": round(seconds, 6),
        "request_id": request_id,
    }
    access_log.info(
        '%s "%s %s" %s %.3f s %s',
        *(fields["client"], fields["method"], fields["path"], status or "-", seconds, request_id),
        extra={"fields": fields},
    )


class Entrance:
    """Refuses requests without a valid key, or with a body that is too large or not JSON. Logs one line per request."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        max_body_bytes: int,
        budget: BytesInFlight,
        hosts: Hosts | None = None,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        """
        Args:
            budget: budget for the bytes of bodies that arrive or are parsed.
            hosts: the host names that requests may address; None: any.
        """
        self._app, self._keys, self._max_body_bytes = app, keys, max_body_bytes
        self._budget, self._hosts, self._body_timeout_s = budget, hosts, body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given_id = headers.get("x-request-id", "")
        request_id = given_id if ALLOWED_ID.fullmatch(given_id) else secrets.token_hex(12)
        began_at, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        body = _Body(self._budget)
        try:
            if self._hosts is not None:
                self._hosts.require(headers)
            name = self._client_name(scope, headers)
            most = 0 if scope["path"] in OPEN_PATHS else self._max_body_bytes
            await body.read(headers, receive, most, self._body_timeout_s)
            scope.setdefault("state", {})["client"] = Client(name, request_id, scope["path"], headers)
            # HEAD is answered like GET; uvicorn omits the body.
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(inner, body.receive, send_with_id)
        except ApiError as error:
            if not status:
                await error_answer(error, scope["path"])(scope, receive, send_with_id)
        finally:
            body.release()
            if scope["path"] not in UNLOGGED_PATHS:
                _log_access(scope, status, time.monotonic() - began_at, request_id)

    def _client_name(self, scope: Scope, headers: Headers) -> str:
        name = self._keys.client(headers)
        if name is None:
            if scope["path"] not in OPEN_PATHS:
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            name = ""
        return name


class _Body:
    """The body of one request, which is received, checked, and then passed to the application."""

    def __init__(self, budget: BytesInFlight) -> None:
        self._task = asyncio.current_task()
        self._holding = Holding(budget, self._end)
        self._error: ApiError | None = None
        self._content = bytearray()
        self._passed: deque[Message] = deque()
        self._receive: Receive | None = None

    async def read(self, headers: Headers, receive: Receive, most: int, timeout_s: float) -> None:
        """Receive and check the body.

        Args:
            most: maximum bytes of the body.

        Raises:
            ApiError: the body is too large or too late, or is not JSON that endpoints should process.
        """
        self._receive = receive
        late = ApiError(
            408, f"the request's body did not arrive within {timeout_s:g} s", headers={"Connection": "close"}
        )
        timer = asyncio.get_running_loop().call_later(timeout_s, self._end, late)
        try:
            length = headers.get("content-length", "").lstrip("0")
            _require_size(int(length[:20]) if length.isdecimal() else 0, most)
            await self._arrive(receive, most)
            self._holding.finish()
            timer.cancel()
            if "content-encoding" in headers and self._content:
                await self._inflate(headers["content-encoding"], most)
            if self._content and most:
                _require_json(headers)
                await _in_pieces(require_nesting(self._content) or ())
                await _in_pieces(replace_lone_surrogates(self._content))
        except asyncio.CancelledError:
            if self._error is None:
                raise
            if hasattr(self._task, "uncancel"):  # missing in Python 3.10, which does not count cancellations
                self._task.uncancel()  # type: ignore[union-attr]
            raise self._error from None
        finally:
            timer.cancel()
            self._holding.finish()
        self._passed.append({"type": "http.request", "body": bytes(self._content), "more_body": False})
        self._content = bytearray()

    async def receive(self) -> Message:
        """Return the body first, then later messages. At the second call, the application has parsed the body."""
        if self._passed:
            return self._passed.popleft()
        self.release()
        assert self._receive is not None
        return await self._receive()

    def release(self) -> None:
        self._holding.release()

    def _end(self, error: ApiError) -> None:
        assert self._task is not None
        self._error = error
        self._task.cancel()

    async def _arrive(self, receive: Receive, most: int) -> None:
        is_complete = False
        while not is_complete:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client disconnected before the end of the body")
            self._add(message.get("body", b""), most)
            is_complete = not message.get("more_body", False)

    def _add(self, piece: bytes, most: int) -> None:
        _require_size(len(self._content) + len(piece), most)
        self._holding.grow(len(piece))
        self._content += piece

    async def _inflate(self, encoding: str, most: int) -> None:
        packed, self._content = self._content, bytearray()
        if encoding.strip().lower() == "identity":
            self._content = packed
            return

        def pieces() -> Iterator[None]:
            for piece in inflated(packed, encoding):
                self._add(piece, most)
                yield

        await _in_pieces(pieces())


async def _in_pieces(work: Iterable[None]) -> None:
    """Do work on the event loop, and let other tasks run after each piece except the first."""
    for index, _ in enumerate(work):
        if index:
            await asyncio.sleep(0)


def _require_json(headers: Headers) -> None:
    given = headers.get("content-type")
    kind = (given or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        was = "is missing" if given is None else f"is {given[:100]!r}"
        raise ApiError(415, f"the header Content-Type {was}; send the body as JSON with 'application/json'")


def _require_size(num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise ApiError(413, f"the request's body has more than {most} bytes, the maximum for this path")
