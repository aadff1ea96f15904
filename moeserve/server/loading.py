"""Responses of a server while its model is being loaded."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from moeserve.server.errors import ApiError, error_answer
from moeserve.server.hosts import hosts_for
from moeserve.server.http_server import budget_of, http_config
from moeserve.server.keys import Keys
from moeserve.server.middleware import Entrance
from moeserve.server.settings import ServerSettings

RETRY_AFTER_S = 5
CLOSE = {"Connection": "close"}  # the next request must reach the server that follows


@contextlib.contextmanager
def answering_while_loading(listener: socket.socket, settings: ServerSettings) -> Iterator[None]:
    """Answer requests from a thread within the context: /health and /ping with status 200, all others with 503.

    Args:
        listener: is closed at the end. A duplicate of it keeps unaccepted connections for the server that follows.
    """
    budget, has_keys = budget_of(settings), bool(settings.api_key or settings.api_key_file)
    hosts = hosts_for(settings.host, settings.allowed_host, has_keys=has_keys)
    app = Entrance(_answer, Keys([]), settings.max_body_bytes, budget, hosts)
    server = uvicorn.Server(http_config(app, settings, budget, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] in ("/health", "/ping"):
        answer = JSONResponse({"status": "alive"}, headers=CLOSE)
    else:
        error = ApiError(503, "the model is being loaded", headers={"Retry-After": str(RETRY_AFTER_S), **CLOSE})
        answer = error_answer(error, scope["path"])
    await answer(scope, receive, send)
