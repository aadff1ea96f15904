"""Small HTTP servers that stand for servers with engines: they record requests, and answer as a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from moeserve.server.http_server import budget_of, http_config
from moeserve.server.prefill_decode_proxy import Router
from moeserve.server.router_server import build_router_app
from moeserve.server.settings import RouterSettings, ServerSettings

Behaviour = Callable[["Received"], Awaitable[Response]]
KEPT = {
    "do_remote_prefill": True,
    "remote_handle": "abc",
    "remote_addresses": ["10.0.0.1:5"],
    "remote_num_blocks": 3,
}


@dataclass(frozen=True)
class Received:
    """A request that a stand-in has received."""

    method: str
    path: str  # with the query
    headers: dict[str, str]
    body: bytes
    request: Request

    @property
    def fields(self) -> Any:
        return json.loads(self.body)


class InThread:
    """An application served in a thread of this process."""

    def __init__(self, app: ASGIApp, config: uvicorn.Config | None = None) -> None:
        self._server = uvicorn.Server(
            config or uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        )
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    def begin_to_stop(self) -> None:
        """Several servers take as long to stop as one if each has begun to stop before the first is waited for."""
        self._server.should_exit = True

    def stop(self) -> None:
        self.begin_to_stop()
        self._thread.join()
        self._listener.close()


class StandIn(InThread):
    """A server whose answers a test chooses."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.received: list[Received] = []
        self.hang_ups = threading.Semaphore(0)  # one for each client that was seen to hang up
        super().__init__(Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST", "DELETE"])]))

    async def _answer(self, request: Request) -> Response:
        if request.url.path == "/health":
            return JSONResponse({})
        query = f"?{request.url.query}" if request.url.query else ""
        received = Received(
            request.method, request.url.path + query, dict(request.headers), await request.body(), request
        )
        if received.path != "/ready":
            self.received.append(received)
        return await self.behaviour(received)

    def take(self) -> Received:
        """Return the only request since the last call."""
        [received] = self.received
        self.received.clear()
        return received


async def keep(received: Received) -> Response:
    """Answer as a prefill server does."""
    return JSONResponse({"kv_transfer_params": KEPT})


async def generate(received: Received) -> Response:
    """Answer as a decode server does."""
    return JSONResponse({"text": "generated"})


def answering(status: int, content: bytes = b"{}", **headers: str) -> Behaviour:
    """Return a behaviour that answers every request in one way."""

    async def answer(received: Received) -> Response:
        return Response(content, status, headers, "application/json")

    return answer


def waiting_for_hang_up(server: StandIn, first: bytes = b"") -> Behaviour:
    """Return a behaviour that sends some bytes, or not even headers, and then waits until the client hangs up."""

    async def wait(received: Received) -> None:
        while not await received.request.is_disconnected():
            await asyncio.sleep(0.01)
        server.hang_ups.release()

    async def answer(received: Received) -> Response:
        if not first:
            await wait(received)
            return Response()

        async def chunks() -> AsyncIterator[bytes]:
            yield first
            try:
                await asyncio.sleep(60)
            finally:  # the client has hung up
                server.hang_ups.release()

        return StreamingResponse(chunks())

    return answer


@contextlib.contextmanager
def standing_in(*behaviours: Behaviour) -> Iterator[list[StandIn]]:
    servers = [StandIn(behaviour) for behaviour in behaviours]
    try:
        yield servers
    finally:
        for server in servers:
            server.begin_to_stop()
        for server in servers:
            server.stop()


@contextlib.contextmanager
def routing(
    prefill: list[str], decode: list[str], server: ServerSettings | None = None, **settings: Any
) -> Iterator[httpx.Client]:
    """Run a router, and return a client of it."""
    router = Router(RouterSettings(prefill=prefill, decode=decode, **settings))
    settings_of_server = server or ServerSettings()
    budget = budget_of(settings_of_server)
    app = build_router_app(router, settings_of_server, budget)
    running = InThread(app, http_config(app, settings_of_server, budget, timeout_graceful_shutdown=1))
    try:
        headers = {"content-type": "application/json"}
        with httpx.Client(base_url=running.url, timeout=30.0, headers=headers) as client:
            yield client
    finally:
        running.stop()


@contextlib.contextmanager
def unreachable() -> Iterator[str]:
    """Return the URL of a port on which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextlib.contextmanager
def closing_connections() -> Iterator[str]:
    """Return the URL of a server that reads the begin of each request, and then closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_all() -> None:
            with contextlib.suppress(OSError):  # the listener is closed
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(100)

        thread = threading.Thread(target=close_all)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # which ends the wait for a connection
            thread.join()
