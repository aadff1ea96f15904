"""Error responses: HTTP status, and format in OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moeserve.errors import (
    EngineError,
    MoeserveError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    SettingsError,
    StaleWeightsError,
)

logger = logging.getLogger(__name__)

TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "request_timeout",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "internal_error",
    503: "service_unavailable_error",
}
ANTHROPIC_TYPES = {500: "api_error", 503: "overloaded_error"}  # types that differ from OpenAI's
ANTHROPIC_PATH = "/v1/messages"
SECONDS_UNTIL_RESTART = 10


class ApiError(Exception):
    """An error that a request is answered with."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            status: HTTP status, one of `TYPE_OF_STATUS`.
            param: name of the invalid parameter.
            code: stable name of the error, for programs.
            anthropic: further fields of the error in Anthropic's format, which clients of this API evaluate.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers, self.anthropic = dict(headers or {}), dict(anthropic or {})

    @property
    def type(self) -> str:
        return TYPE_OF_STATUS[self.status]

    @property
    def body(self) -> dict[str, Any]:
        """The response body in OpenAI's format."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class PromptKept(Exception):
    """A request has ended after its prompt, whose KV cache the engine keeps for another engine. The status is 200."""

    def __init__(self, kv_transfer_params: dict[str, Any] | None) -> None:
        """
        Args:
            kv_transfer_params: parameters for the request to the other engine; None: the prompt does not fill a block.
        """
        super().__init__()
        self.body = {"kv_transfer_params": kv_transfer_params}


def shutting_down() -> ApiError:
    """Return the error for requests that arrive, wait or run while the server shuts down."""
    return ApiError(503, "the server is shutting down", headers={"Retry-After": str(SECONDS_UNTIL_RESTART)})


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's format."""
    kind = ANTHROPIC_TYPES.get(error.status, error.type)
    return {"type": "error", "error": {"type": kind, "message": error.message, **error.anthropic}}


def error_answer(error: ApiError, path: str) -> JSONResponse:
    """Return an error response, in the format of the API to which the path belongs."""
    body = anthropic_body(error) if path.startswith(ANTHROPIC_PATH) else error.body
    return JSONResponse(body, error.status, error.headers)


def api_error(error: MoeserveError) -> ApiError:
    """Return the error for a request that the engine refused or could not finish.

    An engine failure's text is only logged, because it may contain paths and addresses of the host.
    """
    match error:
        case PromptTooLongError():  # clients of Anthropic's API recognise these words, and shorten the conversation
            too_long = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
            return ApiError(400, str(error), param=error.parameter, code=error.code, anthropic={"message": too_long})
        case RequestError():
            return ApiError(400, str(error), param=error.parameter, code=error.code)
        case SettingsError():  # the request needs a package that is not installed
            return ApiError(400, str(error))
        case QueueFullError():
            return ApiError(429, "too many requests are in flight; try again later", headers={"Retry-After": "1"})
        case StaleWeightsError():
            return ApiError(503, str(error), code="stale_weights")
        case EngineError():
            headers = {"Retry-After": str(SECONDS_UNTIL_RESTART)}
            return ApiError(503, "the engine failed while it served this request; try again later", headers=headers)
    return ApiError(500, "the request could not be served")


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_answer(error, request.url.path)


async def _answer_moeserve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MoeserveError)
    return error_answer(api_error(error), request.url.path)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in (404, 405) else 400
    messages = {404: "there is no such path", 405: "this path does not serve this method"}
    headers = dict(error.headers or {})
    message = messages.get(status, "the request cannot be read")
    return error_answer(ApiError(status, message, headers=headers), request.url.path)


async def _answer_failure(request: Request, error: Exception) -> Response:
    logger.error("a request failed", exc_info=error)
    return error_answer(ApiError(500, "the request failed; the server's log says why"), request.url.path)


# Exception handlers of an application, by type of error.
EXCEPTION_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _answer_api_error,
    MoeserveError: _answer_moeserve_error,
    HTTPException: _answer_http_error,
    Exception: _answer_failure,
}
