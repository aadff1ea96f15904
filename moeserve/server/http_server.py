"""The HTTP server of one process: its socket and its shutdown."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from moeserve.errors import SettingsError
from moeserve.processes.logs import log_format
from moeserve.server.bytes_in_flight import BytesInFlight
from moeserve.server.connection import MAX_HEAD_BYTES, Connection
from moeserve.server.middleware import start_access_log
from moeserve.server.settings import ServerSettings

logger = logging.getLogger(__name__)

SECONDS_TO_CLOSE = 1


class Drained(Protocol):
    """An application whose requests are ended before the server shuts down."""

    async def drain(self, timeout_s: float, is_forced: Callable[[], bool]) -> None:
        """Refuse new requests, and wait until running requests have ended. After a timeout, end them with an error.

        Args:
            is_forced: returns True once running requests must end at once.
        """


class DrainingServer(uvicorn.Server):
    """A server that finishes requests in flight before it closes connections."""

    def __init__(
        self,
        app: ASGIApp,
        requests: Drained,
        settings: ServerSettings,
        budget: BytesInFlight,
        max_connections: int | None,
    ) -> None:
        """
        Args:
            requests: drains the application's requests.
            budget: budget for the bytes of requests in flight.
            max_connections: maximum number of connections; further ones get status 503; None: no limit.
        """
        start_access_log()
        self._requests = requests
        self._drain_timeout_s = settings.drain_timeout
        self._has_signal = False
        super().__init__(http_config(app, settings, budget, limit_concurrency=max_connections))

    def answer(self, listener: socket.socket, when_ready: Callable[[], object] = lambda: None) -> None:
        """Serve until SIGTERM, Ctrl-C, or until `should_exit` is set.

        Args:
            when_ready: called once the signals shut the server down.
        """
        # uvicorn handles signals only while its event loop runs. With this handler, earlier signals also end the
        # server. After serving, uvicorn raises the handled signals again. With this handler, that has no effect, so the
        # exit status is 0.
        with ends_handled_by(self.handle_exit):
            when_ready()
            self.run(sockets=[listener])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down. A second signal ends requests at once."""
        self.force_exit = self._has_signal
        self._has_signal = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ends_at = time.monotonic() + self._drain_timeout_s
        await self._requests.drain(self._drain_timeout_s, lambda: self.force_exit)
        # Leave time for clients to read the rest of their responses. Some clients never do.
        self.config.timeout_graceful_shutdown = max(SECONDS_TO_CLOSE, math.ceil(ends_at - time.monotonic()))
        await super().shutdown(sockets)
        if self.force_exit:  # otherwise, uvicorn would cancel tasks with a traceback
            await self.lifespan.shutdown()


def budget_of(settings: ServerSettings) -> BytesInFlight:
    """Return a server's budget for bytes in flight, which always has room for one body."""
    return BytesInFlight(max(settings.max_bytes_in_flight, settings.max_body_bytes + MAX_HEAD_BYTES))


def http_config(app: ASGIApp, settings: ServerSettings, budget: BytesInFlight, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration, with limits on the heads of requests.

    Args:
        options: further options of uvicorn.
    """
    return uvicorn.Config(
        app,
        http=functools.partial(Connection, budget),  # type: ignore[arg-type]  # called as a class would be
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]  # passed to loop.call_later
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        **options,
    )


def listen(settings: ServerSettings) -> socket.socket:
    """Return a listening socket.

    Raises:
        SettingsError: the address or the files for TLS cannot be used.
    """
    if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
        raise SettingsError("TLS needs both ssl_certfile and ssl_keyfile")
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(settings, name)
        if path is not None and not Path(path).is_file():
            raise SettingsError(f"{name}={path!r} is not a file")
    if settings.ssl_certfile is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                settings.ssl_certfile, settings.ssl_keyfile
            )
        except (ssl.SSLError, OSError) as error:
            raise SettingsError(f"ssl_certfile={settings.ssl_certfile!r} or its key cannot be used: {error}") from None
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise SettingsError(f"cannot listen on {settings.host}, port {settings.port}: {error}") from None


def announce(what: str, settings: ServerSettings, listener: socket.socket) -> None:
    """Print or log what the server does, and its address."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    host, port = listener.getsockname()[:2]
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"
    if log_format() == "json":
        logger.info("%s at %s", what, address, extra={"fields": {"address": address}})
    else:
        print(f"{what} at {address}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def ends_handled_by(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within the context, call `handle` for SIGTERM and Ctrl-C. For the main thread only."""
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
