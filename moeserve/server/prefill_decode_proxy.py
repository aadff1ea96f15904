"""`Router`: forwards requests to servers that compute long prompts (prefill) or generate outputs (decode)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import aiohttp
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from moeserve.server.errors import ApiError, shutting_down
from moeserve.server.reply import until_hang_up
from moeserve.server.settings import RouterSettings
from moeserve.server.upstreams import CONNECT_S, Pool, Upstream, answer_headers, open_client, request_headers
from moeserve.telemetry.request_stats import LONG_S

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4  # estimated bytes of text per token
RESPONSES = "/v1/responses"
# The fields of a request that form its prompt, by path.
PROMPT_FIELDS = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages", "tools"),
    RESPONSES: ("instructions", "input", "tools"),
    "/v1/messages": ("system", "messages", "tools"),
}
REMOTE_DECODE = {"do_remote_decode": True}
PASSED_STATUSES = (400, 401, 403, 404, 413, 422)  # of prefill servers; a decode server would return the same
REFUSALS = (429, 503)
# Errors after which the router tries the next decode server, because each server stores only its own responses.
NOT_STORED = frozenset(["previous_response_not_found", "response_not_found", "item_not_found"])
READY_S = 2.0  # timeout of a decode server's readiness check
SECONDS_TO_END = 1.0  # time for cancelled requests to end


class Router:
    """The servers behind the router, and the requests in flight."""

    def __init__(self, settings: RouterSettings) -> None:
        """
        Raises:
            SettingsError: a URL cannot be used.
        """
        self._settings = settings
        self._prefill, self._decode = Pool("prefill", settings.prefill), Pool("decode", settings.decode)
        self._client: aiohttp.ClientSession | None = None  # belongs to the event loop
        self._metrics = _Metrics()
        self._running: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keep connections to the servers open within the context, in an event loop."""
        async with open_client() as self._client:
            watches = [
                asyncio.create_task(server.watch(self._client))
                for server in (*self._prefill.servers, *self._decode.servers)
            ]
            try:
                yield
            finally:
                for watch in watches:
                    watch.cancel()
                await asyncio.gather(*watches, return_exceptions=True)

    async def generate(self, request: Request) -> Response:
        """Respond to a request that generates text."""
        body = await request.body()
        num_tokens = _prompt_tokens(request.url.path, body)

        async def answer(send: Send) -> None:
            path = "direct"
            passed = body
            if num_tokens >= self._settings.min_remote_prefill:
                computed = await self._compute(request, body)
                if isinstance(computed, Response):
                    await computed(request.scope, request.receive, send)
                    return
                path = "fallback" if computed is None else "remote"
                passed = body if computed is None else _with_transfer(body, computed)
            self._metrics.requests.labels(path).inc()
            await self._pass_on(request, passed, send)

        return self._answer(answer)

    async def forward(self, request: Request) -> Response:
        """Forward any other request to a decode server."""
        body = await request.body()
        return self._answer(lambda send: self._pass_on(request, body, send))

    async def health(self, request: Request) -> Response:
        """Respond as long as the router's process is alive."""
        return JSONResponse({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """Respond with status 200 if a decode server is ready."""
        if self._is_closed:
            raise shutting_down()
        if not any(await asyncio.gather(*map(self._is_ready, self._decode.servers))):
            raise ApiError(503, "no decode server is ready", headers={"Retry-After": "10"})
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Return the metrics for Prometheus."""
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def drain(self, timeout_s: float, is_forced: Callable[[], bool]) -> None:
        """Refuse new requests, and wait until running requests have ended. After a timeout, cancel them.

        Args:
            is_forced: returns True once running requests must end at once.
        """
        self._is_closed = True
        ends_at = time.monotonic() + timeout_s
        while self._running and time.monotonic() < ends_at and not is_forced():
            await asyncio.sleep(0.05)
        if self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running, timeout=SECONDS_TO_END)

    def _answer(self, answer: Callable[[Send], Awaitable[None]]) -> Response:
        if self._is_closed:
            raise shutting_down()
        return _Answer(answer, self._running)

    async def _compute(self, request: Request, body: bytes) -> dict[str, Any] | Response | None:
        """Send a prompt to a prefill server.

        Returns:
            The parameters with which a decode server loads the computed KV blocks, or an error response for the client.
            None: the decode server must compute the prompt.
        """
        for server in self._prefill.by_load():
            try:
                return await self._computed_by(server, request, _with_transfer(body, REMOTE_DECODE))
            except _PrefillFailure as failure:
                self._metrics.prefill_failures.labels(failure.reason).inc()
                if failure.cause:
                    logger.warning("the prefill server %s failed: %s", server.url, failure.cause)
                if failure.reason not in ("refused", "unreachable"):  # the attempt took long, so do not try another
                    break
        return None

    async def _computed_by(self, server: Upstream, request: Request, body: bytes) -> dict[str, Any] | Response | None:
        """Send a prompt to one server. Returns are as for `_compute`.

        Raises:
            _PrefillFailure: the server has computed nothing.
        """
        if server.is_avoided:  # servers to avoid come last, so only such servers are left
            raise _PrefillFailure("unreachable")
        began_s = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=self._settings.prefill_timeout, sock_connect=CONNECT_S)
        try:
            with server.loaded(len(body)):
                async with self._request(server, request, body, timeout=timeout) as answer:
                    content = await answer.read()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            server.avoid()
            is_late = isinstance(error, asyncio.TimeoutError) and not isinstance(error, aiohttp.ClientError)
            raise _PrefillFailure("timeout" if is_late else "unreachable", _shown(error)) from None
        if answer.status == 200:
            try:
                kept = msgspec.json.decode(content, type=_Kept)
            except msgspec.DecodeError as error:
                raise _PrefillFailure("error", _shown(error)) from None
            self._metrics.prefill_seconds.observe(time.monotonic() - began_s)
            return kept.kv_transfer_params
        if answer.status in REFUSALS:
            raise _PrefillFailure("refused")
        if answer.status not in PASSED_STATUSES or b"kv_transfer" in content:  # not the client's fault
            raise _PrefillFailure("error", f"status {answer.status}: {content[:300]!r}")
        self._metrics.requests.labels("refused").inc()
        return _copied(answer, content)

    async def _pass_on(self, request: Request, body: bytes, send: Send) -> None:
        """Send a request to a decode server, and the server's response to the client.

        Another server is tried if a server is unreachable, closes the connection before it responds, refuses the
        request, or does not have the stored response that the request refers to.

        Raises:
            ApiError: no server has responded.
        """
        silence_s = self._settings.decode_timeout
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        began_s = time.monotonic()
        servers = self._decode.by_load()
        not_stored: list[Response] = []
        for server in servers:
            try:
                with server.loaded(1):
                    async with await server.begun(self._request(server, request, body, timeout=timeout)) as answer:
                        if request.url.path.startswith(RESPONSES) and answer.status in (400, 404):
                            content = await answer.read()
                            if _is_not_stored(content):
                                not_stored.append(_copied(answer, content))
                                continue
                            await _copied(answer, content)(request.scope, request.receive, send)
                            return
                        if answer.status not in REFUSALS or server is servers[-1]:
                            self._metrics.answer_seconds.observe(time.monotonic() - began_s)
                            await _send_answer(answer, send)
                            return
            except aiohttp.SocketTimeoutError:  # another server would take as long
                message = f"the decode server sent nothing for {silence_s:g} s"
                raise ApiError(503, message, headers={"Retry-After": "10"}) from None
            except (aiohttp.ClientError, OSError) as error:
                server.avoid()
                logger.warning("the decode server %s failed: %s", server.url, _shown(error))
            self._metrics.decode_failures.inc()
        if len(not_stored) == len(servers):
            await not_stored[0](request.scope, request.receive, send)
            return
        raise ApiError(503, "no decode server can be reached; try again later", headers={"Retry-After": "1"})

    def _request(self, server: Upstream, request: Request, body: bytes, **options: Any) -> Any:
        """Send a client's request to a server. Return the context manager of the response."""
        assert self._client is not None
        return self._client.request(
            request.method,
            URL(server.url + _target(request), encoded=True),
            data=body or None,
            headers=request_headers(request.headers, request.state.client.request_id),
            allow_redirects=False,
            **options,
        )

    async def _is_ready(self, server: Upstream) -> bool:
        assert self._client is not None
        timeout = aiohttp.ClientTimeout(total=READY_S)
        try:
            async with self._client.get(f"{server.url}/ready", timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return False


class _Answer(Response):
    """A response that is forwarded while it arrives. If the client disconnects, forwarding is cancelled."""

    def __init__(self, answer: Callable[[Send], Awaitable[None]], running: set[asyncio.Task[None]]) -> None:
        """
        Args:
            answer: sends the response.
            running: the tasks of all responses. Cancelling a task aborts its response.
        """
        super().__init__()
        self._answer, self._running = answer, running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        async def answer() -> None:
            await self._answer(send_noted)

        task = asyncio.create_task(answer())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await until_hang_up(task, receive)
        if task.cancelled() and not has_begun:  # cancelled by `drain`, or by a client that no longer reads
            raise shutting_down()


class _PrefillFailure(Exception):
    """A prefill server did not compute a prompt."""

    def __init__(self, reason: str, cause: str = "") -> None:
        """
        Args:
            reason: "unreachable", "timeout", "refused" or "error".
            cause: text for the log; empty: log nothing.
        """
        super().__init__(cause)
        self.reason, self.cause = reason, cause


class _Kept(msgspec.Struct):
    """The response of a prefill server that has computed a prompt."""

    kv_transfer_params: dict[str, Any] | None


class _RefusalDetail(msgspec.Struct):
    code: str | None = None


class _Refusal(msgspec.Struct):
    """An error response of a server, in OpenAI's format."""

    error: _RefusalDetail


class _Metrics:
    """The metrics of one router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "moeserve_router_requests",
            "Requests for generated text: to a decode server alone (direct), after a prefill server (remote), without "
            "the prefill server that failed (fallback), or refused by a prefill server (refused).",
            ["path"],
            registry=self.registry,
        )
        self.prefill_failures = Counter(
            "moeserve_router_prefill_failures",
            "Prompts that a prefill server should have computed: it was unreachable, refused (status 429 or 503), was "
            "too slow (timeout), or answered otherwise (error).",
            ["reason"],
            registry=self.registry,
        )
        self.decode_failures = Counter(
            "moeserve_router_decode_failures",
            "Decode servers that were unreachable or refused a request.",
            registry=self.registry,
        )
        self.prefill_seconds = Histogram(
            "moeserve_router_prefill_seconds",
            "Time that prefill servers took to compute a prompt.",
            buckets=LONG_S,
            registry=self.registry,
        )
        self.answer_seconds = Histogram(
            "moeserve_router_answer_seconds",
            "Time from a request to decode servers to the beginning of the response.",
            buckets=LONG_S,
            registry=self.registry,
        )


def _is_not_stored(content: bytes) -> bool:
    """Return True if a server's error says that it does not have a stored response."""
    try:
        return msgspec.json.decode(content, type=_Refusal).error.code in NOT_STORED
    except msgspec.DecodeError:
        return False


def _copied(answer: aiohttp.ClientResponse, content: bytes) -> Response:
    """Return a response for the client with the status, headers and content of a server's response."""
    copied = Response(content, answer.status)
    copied.raw_headers = answer_headers(answer)
    return copied


async def _send_answer(answer: aiohttp.ClientResponse, send: Send) -> None:
    """Forward a server's response to the client as it arrives. If the server breaks off, so does this response."""
    await send({"type": "http.response.start", "status": answer.status, "headers": answer_headers(answer)})
    try:
        async for chunk in answer.content.iter_any():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except (aiohttp.ClientError, OSError) as error:
        logger.warning("an answer of %s broke off: %s", answer.url.origin(), _shown(error))
        return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _target(request: Request) -> str:
    """Return the path and query of a request as the client wrote them.

    Raises:
        ApiError: the path has a segment "." or "..", so a server may serve another path than the router checked.
    """
    path, query = request.scope["raw_path"].decode("latin-1"), request.scope["query_string"].decode("latin-1")
    if {".", ".."} & set(unquote(path).replace("\\", "/").split("/")):
        raise ApiError(404, "there is no such path")
    return f"{path}?{query}" if query else path


def _shown(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _with_transfer(body: bytes, params: dict[str, Any]) -> bytes:
    """Return the JSON of a request with `kv_transfer_params` added. All other bytes are unchanged."""
    before, brace, rest = body.partition(b"{")
    return b"".join([before, brace, b'"kv_transfer_params":', msgspec.json.encode(params), b",", rest])


def _prompt_tokens(path: str, body: bytes) -> int:
    """Estimate the number of tokens of a request's prompt; 0 if a decode server should compute it in any case.

    Raises:
        ApiError: the request has `kv_transfer_params`.
    """
    try:
        fields = json.loads(body)  # the servers' parser, so that nothing they accept is missed
    except (ValueError, RecursionError):
        return 0
    if not isinstance(fields, dict):
        return 0
    if "kv_transfer_params" in fields:  # only the router may choose the addresses that servers connect to
        name = "kv_transfer_params"
        raise ApiError(400, f"{name} is not supported here", param=name, code="unsupported_parameter")
    if path == RESPONSES and _refers_to_stored(fields):  # only the decode server that stores it can compute the prompt
        return 0
    prompt = fields.get("prompt")
    has_several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    if has_several or fields.get("echo") or fields.get("prompt_logprobs") is not None:
        return 0
    return sum(_num_bytes(fields.get(name)) for name in PROMPT_FIELDS[path]) // BYTES_PER_TOKEN


def _refers_to_stored(fields: dict[str, Any]) -> bool:
    """Return True if a request refers to a stored response, or to an item in a stored response."""
    items = fields.get("input")
    return fields.get("previous_response_id") is not None or any(
        isinstance(item, dict) and "id" in item and "role" not in item and item.get("type") in (None, "item_reference")
        for item in (items if isinstance(items, list) else ())
    )


def _num_bytes(part: Any) -> int:
    """Return the bytes of all texts in a part of a request. A token id counts as `BYTES_PER_TOKEN`."""
    match part:
        case str():
            return len(part.encode(errors="surrogatepass"))
        case [int(), *_]:
            return BYTES_PER_TOKEN * len(part)
        case list():
            return sum(map(_num_bytes, part))
        case dict():
            return sum(map(_num_bytes, part.values()))
    return 0
