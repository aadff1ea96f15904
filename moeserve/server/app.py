"""The web application: its routes, and error responses for invalid bodies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from moeserve import __version__
from moeserve.server import tokens
from moeserve.server.anthropic import messages
from moeserve.server.bytes_in_flight import BytesInFlight
from moeserve.server.client import Client
from moeserve.server.errors import EXCEPTION_HANDLERS, TYPE_OF_STATUS, ApiError, error_answer
from moeserve.server.hosts import hosts_for
from moeserve.server.keys import Keys
from moeserve.server.metrics import Metrics
from moeserve.server.middleware import Entrance
from moeserve.server.openai import chat, completions, responses, stored_responses
from moeserve.server.openai.response_store import ResponseStore
from moeserve.server.operators import add_operator_routes, for_administrators, for_programs
from moeserve.server.rollouts import add_rollout_routes
from moeserve.server.scaling import add_scale_route
from moeserve.server.schema import UNSUPPORTED
from moeserve.server.service import Service
from moeserve.server.settings import ServerSettings
from moeserve.server.sglang import add_sglang_routes
from moeserve.server.statistics import Statistics
from moeserve.server.status import Status, StatusReader
from moeserve.server.token_generation import add_token_generation_route


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorAnswer} for status in TYPE_OF_STATUS}
ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": AnthropicErrorAnswer} for status in ERRORS}
EVENT_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def _client(request: Request) -> Client:
    client: Client = request.state.client
    return client


def build_app(service: Service, settings: ServerSettings, keys: Keys, budget: BytesInFlight) -> FastAPI:
    """Return the application that serves one model.

    Args:
        budget: budget for the bytes of request bodies in flight.
    """
    hosts = hosts_for(settings.host, settings.allowed_host, has_keys=keys.are_required)

    statistics = Statistics(service, settings.log_stats_interval)

    @contextlib.asynccontextmanager
    async def admitting(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(service.follow_other_processes()), asyncio.create_task(statistics.run())]
        yield
        for task in tasks:
            task.cancel()

    app = FastAPI(
        title="moeserve", version=__version__, responses=ERRORS, docs_url=None, redoc_url=None, lifespan=admitting
    )
    # Routes are tried in order, so the routes that clients use most come first.
    _add_model_routes(app, service, ResponseStore() if settings.response_store else None)
    _add_status_routes(app, service, statistics)
    of_trainer = for_programs() if settings.rl_without_key else for_administrators(keys)
    add_operator_routes(app, service, of_trainer)
    if service.llm.config.weights.rl:
        add_rollout_routes(app, service, of_trainer)
        add_sglang_routes(app, service, of_trainer)
        add_token_generation_route(app, service, of_trainer)
    if settings.enable_tokenizer_info_endpoint:
        _add_tokenizer_info(app, service)
    if settings.allow_scale:
        add_scale_route(app, service, keys)
    for kind, handler in EXCEPTION_HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(RequestValidationError, _answer_invalid_body)
    app.add_middleware(Entrance, keys=keys, max_body_bytes=settings.max_body_bytes, budget=budget, hosts=hosts)
    if settings.cors_origin:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors_origin, allow_methods=["*"], allow_headers=["*"])
    return app


def _add_status_routes(app: FastAPI, service: Service, statistics: Statistics) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Respond as long as the server's process is alive."""
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Respond with status 200 if the engine serves requests."""
        if not service.is_ready:
            raise ApiError(503, "the engine serves no requests now", headers={"Retry-After": "10"})
        return {"status": "ready"}

    metrics, status = Metrics(service), StatusReader(service, statistics)

    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        """Return the status page."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(status.page, headers={"Content-Security-Policy": policy})

    @app.get("/status")
    async def read_status() -> Status:
        """Return the data of the status page."""
        return status.read()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _add_model_routes(app: FastAPI, service: Service, store: ResponseStore | None) -> None:
    @app.post("/v1/completions", response_model=completions.Completion, responses=EVENT_STREAM)
    async def create_completion(body: completions.CompletionRequest, request: Request) -> Response:
        return completions.complete(service, _client(request), body)

    @app.post("/v1/chat/completions", response_model=chat.ChatCompletion, responses=EVENT_STREAM)
    async def create_chat_completion(body: chat.ChatRequest, request: Request) -> Response:
        return await chat.answer(service, _client(request), body)

    @app.post("/v1/responses", response_model=responses.ResponseAnswer, responses=EVENT_STREAM)
    async def create_response(body: responses.ResponsesRequest, request: Request) -> Response:
        return responses.answer(service, store, _client(request), body)

    @app.get("/v1/responses/{response_id}", response_model=responses.ResponseAnswer)
    async def retrieve_response(response_id: str, request: Request) -> Response:
        return stored_responses.retrieve(store, _client(request), response_id)

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> stored_responses.DeletedResponse:
        return stored_responses.delete(store, _client(request), response_id)

    @app.post("/v1/messages", response_model=messages.MessageAnswer, responses=ANTHROPIC_ERRORS | EVENT_STREAM)
    async def create_message(body: messages.MessagesRequest, request: Request) -> Response:
        return messages.answer(service, _client(request), body)

    @app.post("/v1/messages/count_tokens", responses=ANTHROPIC_ERRORS)
    async def count_tokens(body: messages.CountRequest, request: Request) -> messages.TokenCount:
        return await messages.count_tokens(service, _client(request), body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service, name) for name in service.model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model_card(service, service.require_model(name))

    @app.post("/tokenize", response_model=tokens.Tokenized)
    async def tokenize(body: tokens.TokenizeRequest, request: Request) -> Response:
        return await tokens.tokenize(service, _client(request), body)

    @app.post("/detokenize")
    async def detokenize(body: tokens.DetokenizeRequest) -> tokens.Detokenized:
        return await tokens.detokenize(service, body)


def _add_tokenizer_info(app: FastAPI, service: Service) -> None:
    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Return the configuration of the tokenizer, with its special tokens and the chat template."""
        return tokens.tokenizer_info(service)


def _model_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "moeserve",
        "max_model_len": service.max_model_len,
    }


async def _answer_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_answer(_invalid_body(error), request.url.path)


def _invalid_body(error: RequestValidationError) -> ApiError:
    errors = error.errors()
    # For a union, pydantic reports errors of each branch. The branch that fits best has the deepest error.
    wrong = max(errors, key=lambda each: (each["type"] == UNSUPPORTED, len(each["loc"])))
    path = _path(wrong["loc"][1:], error.body, ends_in_new_field=wrong["type"] == "missing")
    name, param = ".".join(path)[:200], path[0][:200] if path else None
    if wrong["type"] == "json_invalid":
        read, why = error.body[: wrong["loc"][-1]], wrong["ctx"]["error"]
        where = f"line {read.count(chr(10)) + 1}, column {len(read) - read.rfind(chr(10))}"
        return ApiError(400, f"the request is not valid JSON: {why}, at {where}")
    if error.body is None:
        return ApiError(400, "the request's body is empty or null; send an object as JSON")
    if wrong["type"] == UNSUPPORTED:
        error_code = wrong.get("ctx", {}).get("code")
        anthropic = {} if error_code is None else {"details": {"error_code": error_code}}
        return ApiError(400, f"{name} {wrong['msg']}", param=param, code="unsupported_parameter", anthropic=anthropic)
    return ApiError(400, f"{name or 'the request'}: {wrong['msg']}", param=param)


def _path(location: Sequence[int | str], body: Any, *, ends_in_new_field: bool) -> list[str]:
    """Return the path of an error in the body, without the union branches that pydantic includes in locations.

    Pydantic names union branches by classes, and no field has such a name. A null counts as a missing field.
    """
    path = []
    for part in location:
        if isinstance(body, list) if isinstance(part, int) else isinstance(body, dict) and body.get(part) is not None:
            path.append(str(part))
            body = body[part]
    return [*path, str(location[-1])] if ends_in_new_field and location else path
