"""The servers behind a router, and how busy they are."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from starlette.datastructures import Headers

from moeserve.errors import SettingsError, shown

CONNECT_S = 3.0  # timeout for connecting to a host
AVOID_S = 5.0  # time after a failure for which other servers are preferred
# Each server is asked for /health at this interval. After two failed checks in a row, it counts as silent.
HEALTH_INTERVAL_S, HEALTH_TIMEOUT_S, MAX_FAILED_CHECKS = 1.0, 2.0, 2
# Shorter than the time after which servers close idle connections, so that requests use no connection that is closing.
IDLE_S = 2.0
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # to detect that a host is gone

CONNECTION_HEADERS = frozenset(
    ["connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"]
)
OWN_REQUEST_HEADERS = CONNECTION_HEADERS | {"host", "content-length", "accept-encoding", "expect", "x-request-id"}
OWN_ANSWER_HEADERS = frozenset(name.encode() for name in CONNECTION_HEADERS | {"date", "server", "x-request-id"})


class SilentError(OSError):
    """A server accepts connections, but does not answer."""


class Upstream:
    """One server behind the router."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.load = 0  # total work of the server's current requests; see `loaded`
        self._avoided_until = 0.0
        self._num_failed_checks = 0
        self._waiting: set[asyncio.Task[aiohttp.ClientResponse]] = set()  # tasks that wait for a response to begin

    @property
    def is_silent(self) -> bool:
        return self._num_failed_checks >= MAX_FAILED_CHECKS

    @property
    def is_avoided(self) -> bool:
        return self.is_silent or time.monotonic() < self._avoided_until

    def avoid(self) -> None:
        """Prefer other servers for a while, because a request has failed."""
        self._avoided_until = time.monotonic() + AVOID_S

    async def watch(self, client: aiohttp.ClientSession) -> None:
        """Check the server's health at intervals, forever. Cancel requests that wait for it while it is silent."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            try:
                async with client.get(f"{self.url}/health", timeout=timeout):
                    self._num_failed_checks = 0
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
                self._num_failed_checks += 1
            if self.is_silent:
                for task in self._waiting:
                    task.cancel()

    async def begun(self, answer: Coroutine[Any, Any, aiohttp.ClientResponse]) -> aiohttp.ClientResponse:
        """Wait for the beginning of a response.

        Raises:
            SilentError: the server does not respond to health checks.
        """
        if self.is_silent:
            answer.close()
            raise SilentError(f"{self.url} does not answer")
        task = asyncio.ensure_future(answer)
        self._waiting.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._waiting.discard(task)
            if not task.done():  # the client has disconnected
                task.cancel()
        if task.cancelled():
            raise SilentError(f"{self.url} does not answer")
        return task.result()

    @contextlib.contextmanager
    def loaded(self, amount: int) -> Iterator[None]:
        """Within the context, add the amount of work of a request to the server's load."""
        self.load += amount
        try:
            yield
        finally:
            self.load -= amount


class Pool:
    """Servers with the same role."""

    def __init__(self, name: str, urls: Iterable[str]) -> None:
        """
        Args:
            name: name of the setting that has the URLs, for error messages.

        Raises:
            SettingsError: a URL cannot be used.
        """
        self.servers = [Upstream(_base_url(name, url)) for url in urls]

    def by_load(self) -> list[Upstream]:
        """Return the servers, the least loaded first, and servers that are avoided last."""
        return sorted(self.servers, key=lambda server: (server.is_avoided, server.load))


def open_client() -> aiohttp.ClientSession:
    """Return an HTTP client that passes bodies on unchanged, and keeps no cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, socket_factory=_watched_socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


def request_headers(headers: Headers, request_id: str) -> list[tuple[str, str]]:
    """Return the headers that a server gets with a client's request, including the API key."""
    passed = [(name, value) for name, value in headers.items() if name not in OWN_REQUEST_HEADERS]
    return [*passed, ("x-request-id", request_id)]


def answer_headers(answer: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """Return the headers that the client gets with a server's response."""
    return [(name, value) for name, value in answer.raw_headers if name.lower() not in OWN_ANSWER_HEADERS]


def _base_url(name: str, url: str) -> str:
    base = url.rstrip("/").removesuffix("/v1")  # servers print their address with /v1
    try:
        parts = urlsplit(base)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid host or port
        is_usable = False
    if not is_usable or parts.path or parts.query or parts.fragment or parts.username:
        raise SettingsError(f"{name}={shown(url)} is not the URL of a server; give one such as http://10.0.0.1:8000")
    return base


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that fails if the other host is gone, even while a response takes long."""
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):  # missing on macOS
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return opened
