"""`serve --prefill URL --decode URL`: the HTTP server of a router. It does not import the engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from moeserve.server.bytes_in_flight import BytesInFlight
from moeserve.server.errors import EXCEPTION_HANDLERS
from moeserve.server.hosts import hosts_for
from moeserve.server.http_server import DrainingServer, announce, budget_of, listen
from moeserve.server.keys import Keys
from moeserve.server.middleware import Entrance
from moeserve.server.prefill_decode_proxy import PROMPT_FIELDS, Router
from moeserve.server.settings import RouterSettings, ServerSettings

MAX_CONNECTIONS = 8192
# Routes that the router forwards to any decode server, with their methods.
FORWARDED = {
    "/v1/models": ["GET"],
    "/v1/models/{name:path}": ["GET"],
    "/v1/messages/count_tokens": ["POST"],
    "/v1/responses/{response_id}": ["GET", "DELETE"],
    "/tokenize": ["POST"],
    "/detokenize": ["POST"],
    "/tokenizer_info": ["GET"],
    "/version": ["GET"],
    "/openapi.json": ["GET"],
}


def route(settings: ServerSettings, routes: RouterSettings) -> None:
    """Route requests until SIGTERM or Ctrl-C.

    Raises:
        SettingsError: a setting cannot be used.
    """
    router = Router(routes)
    with contextlib.closing(listen(settings)) as listener:
        budget = budget_of(settings)
        server = DrainingServer(build_router_app(router, settings, budget), router, settings, budget, MAX_CONNECTIONS)
        what = f"routing to {len(routes.prefill)} prefill and {len(routes.decode)} decode servers"
        server.answer(listener, lambda: announce(what, settings, listener))


def build_router_app(router: Router, settings: ServerSettings, budget: BytesInFlight) -> Starlette:
    """Return the router's application. The router leaves the check of API keys to the servers.

    Args:
        budget: budget for the bytes of request bodies in flight.
    """

    @contextlib.asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[None]:
        async with router.connected():
            yield

    hosts = hosts_for(settings.host, settings.allowed_host, has_keys=False)
    limits: dict[str, Any] = {"max_body_bytes": settings.max_body_bytes, "budget": budget, "hosts": hosts}
    middleware = [Middleware(Entrance, keys=Keys([]), **limits)]
    if settings.cors_origin:
        allowed: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"]}
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=settings.cors_origin, **allowed))
    return Starlette(
        routes=[
            Route("/health", router.health),
            Route("/ready", router.ready),
            Route("/metrics", router.metrics),
            *(Route(path, router.generate, methods=["POST"]) for path in PROMPT_FIELDS),
            *(Route(path, router.forward, methods=methods) for path, methods in FORWARDED.items()),
        ],
        middleware=middleware,
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=connected,
    )
