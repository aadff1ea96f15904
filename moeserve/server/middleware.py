"""Processing of every request before its endpoint: request id, API key, size limit, and access log."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeserve.server.client import Client
from moeserve.server.errors import ApiError, error_answer
from moeserve.server.keys import Keys
from moeserve.server.nesting import require_nesting

access_log = logging.getLogger("moeserve.access")

ACCESS_FORMAT, TIME_FORMAT = "%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"

# Paths that monitors read. They need no key and accept no body.
OPEN_PATHS = frozenset(["/", "/health", "/ready", "/version"])
BODY_TIMEOUT_S = 60.0  # from a request's headers to the end of its body
ALLOWED_ID = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


def start_access_log() -> None:
    """Write the access log to standard error, in its own format and regardless of the process's log level."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(ACCESS_FORMAT, TIME_FORMAT))
    access_log.handlers = [handler]
    access_log.propagate = False
    access_log.setLevel(logging.INFO)


class Entrance:
    """Refuses requests without a valid key or with a body that is too large or too deep. Logs one line per request."""

    def __init__(self, app: ASGIApp, keys: Keys, max_body_bytes: int, body_timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._app, self._keys, self._max_body_bytes = app, keys, max_body_bytes
        self._body_timeout_s = body_timeout_s

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

        try:
            name = self._client_name(scope, headers)
            scope.setdefault("state", {})["client"] = Client(name, request_id, scope["path"], headers)
            await self._app(scope, await self._received(scope, headers, receive), send_with_id)
        except ApiError as error:
            if not status:
                await error_answer(error, scope["path"])(scope, receive, send_with_id)
        finally:
            address = (scope.get("client") or ["-"])[0]
            path = quote(scope["path"])  # so that a newline in the path cannot forge a log line
            seconds = time.monotonic() - began_at
            access_log.info(
                '%s "%s %s" %s %.3f s %s', address, scope["method"], path, status or "-", seconds, request_id
            )

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

    async def _received(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Receive the body. Return a function that returns the body first, and then later messages."""
        most = 0 if scope["path"] in OPEN_PATHS else self._max_body_bytes
        length = headers.get("content-length", "")
        _require_size(int(length) if length.isdecimal() else 0, most)
        try:
            body = await asyncio.wait_for(_body(receive, most), self._body_timeout_s)
        except asyncio.TimeoutError:
            message = f"the request's body did not arrive within {self._body_timeout_s:g} s"
            raise ApiError(408, message, headers={"Connection": "close"}) from None
        require_nesting(body)
        given = deque([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def next_message() -> Message:
            return given.popleft() if given else await receive()

        return next_message


async def _body(receive: Receive, most: int) -> bytearray:
    body, is_complete = bytearray(), False
    while not is_complete:
        message = await receive()
        body += message.get("body", b"")
        _require_size(len(body), most)
        is_complete = not message.get("more_body", False)
    return body


def _require_size(num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise ApiError(413, f"the request's body has more than {most} bytes, the maximum for this path")
