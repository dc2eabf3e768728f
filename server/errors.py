"""OpenAI-shaped errors: every failure a client sees is made here."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from engine.request import EngineDeadError, QueueFullError, RequestError
from server.apis.shared.schema.error import (
    AnthropicError,
    AnthropicErrorDetail,
    ErrorBody,
    ErrorDetail,
)
from server.observability.private_traceback import private_traceback

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "The server had an error while processing your request."
ENGINE_UNAVAILABLE = "The engine is loading or has failed; GET /health tells which."
NO_FAULTS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that ask for an end. All others are faults of one request, also those that derive from
BaseException alone, as panics of Rust extensions do."""
MAX_RETRY_AFTER = 60
"""Seconds; a guess about a later time is worth little."""

_ANTHROPIC_PATHS = "/v1/messages"
_OPENAI_TYPES = {408: "timeout_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A failure with its HTTP status and OpenAI error fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> ErrorBody:
        detail = ErrorDetail(
            message=self.message, type=_error_type(self.status), param=self.param, code=self.code
        )
        return ErrorBody(error=detail)

    def to_response(self, path: str) -> Response:
        """The answer to a request for a path, in the shape of the API that the path belongs to."""
        is_anthropics = path.startswith(_ANTHROPIC_PATHS)
        body = anthropic_error(self) if is_anthropics else self.body
        return Response(
            body.to_json(),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def retry_later(status: int, message: str, code: str, seconds: float) -> ApiError:
    """For a request that may well succeed a little later.

    Args:
        seconds: until then, by estimate; the client is told 1 to `MAX_RETRY_AFTER`.
    """
    headers = {"Retry-After": str(math.ceil(min(max(1.0, seconds), MAX_RETRY_AFTER)))}
    return ApiError(status, message, code=code, headers=headers)


def deadline_passed() -> ApiError:
    """OpenAI's clients repeat what fails with 408, unless they are told not to."""
    message = "The request took longer than this server allows."
    headers = {"x-should-retry": "false"}
    return ApiError(408, message, code="request_timeout", headers=headers)


def body_too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than the limit of {max_bytes} bytes.",
        code="request_too_large",
    )


def anthropic_error(error: ApiError) -> AnthropicError:
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    detail = AnthropicErrorDetail(
        type=_ANTHROPIC_TYPES.get(error.status, fallback), message=error.message
    )
    return AnthropicError(type="error", error=detail)


def to_api_error(error: BaseException) -> ApiError:
    """What the client is told about any failure; an unforeseen one is logged, not told."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case QueueFullError():
            return retry_later(429, str(error), "queue_full", error.expected_wait)
        case EngineDeadError():
            return ApiError(503, ENGINE_UNAVAILABLE, code="engine_unavailable")
        case RequestValidationError():
            return _validation_error(error.errors())
    log_unexpected(error)
    return ApiError(500, INTERNAL_ERROR)


def log_unexpected(error: BaseException) -> None:
    """Its message stays out of the log, unless that is for debugging: it may quote a prompt."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.error("unexpected error", exc_info=error)
    else:
        logger.error("unexpected error\n%s", private_traceback(error))


def in_api_terms(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The engine's error with its field under the name that an API gives it.

    Args:
        names: the API's name of a field, or of the object it is in, by the engine's, where they
            differ.
    """
    own = error.param or ""
    head, dot, rest = own.partition(".")
    name = names.get(own) or (f"{names[head]}{dot}{rest}" if head in names else own)
    if name == own:
        return error
    message = str(error).replace(f"{own}=", f"{name}=")
    for theirs, ours in {**names, own: name}.items():
        message = message.replace(f"'{theirs}'", f"'{ours}'")
    return RequestError(message, param=name, code=error.code)


def add_error_handlers(app: FastAPI, routes: Sequence[Route]) -> None:
    """Answer every foreseen exception of a route, and the router's own, in OpenAI's shape.

    Args:
        routes: all that the app has; they tell what a path allows.
    """

    async def handle(request: Request, error: Exception) -> Response:
        return to_api_error(error).to_response(request.scope["path"])

    async def handle_routing(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        # Not request.url, which has the Host header in it.
        path = request.scope["path"]
        place = f"{request.method} {path}"
        message, code = {
            404: (f"Unknown request URL: {place}.", "unknown_url"),
            405: (f"The method is not allowed here: {place}.", "method_not_allowed"),
        }.get(error.status_code, (str(error.detail), None))
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = allowed_methods(routes, request.scope)
        answer = ApiError(error.status_code, message, code=code, headers=headers)
        return answer.to_response(path)

    for foreseen in (ApiError, RequestError, QueueFullError, EngineDeadError):
        app.add_exception_handler(foreseen, handle)
    app.add_exception_handler(RequestValidationError, handle)
    app.add_exception_handler(HTTPException, handle_routing)


def allowed_methods(routes: Sequence[Route], scope: Scope) -> str:
    """What the Allow header says of a path; empty where there is none.

    The router itself names the methods of the first route on a path only.
    """
    on_path = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
    methods = {method for route in on_path for method in route.methods or ()}
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))


def _error_type(status: int) -> str:
    if status in _OPENAI_TYPES:
        return _OPENAI_TYPES[status]
    return "server_error" if status >= 500 else "invalid_request_error"


def _validation_error(problems: Sequence[Any]) -> ApiError:
    problem = problems[0]
    param = _param(problem["loc"])
    if param is None:
        return ApiError(400, "The request body must be a JSON object.")
    if problem["type"] == "extra_forbidden":
        message = f"'{param}' is not supported by this server."
        return ApiError(400, message, param=param, code="unsupported_parameter")
    if problem["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param)
    return ApiError(400, f"Invalid value for '{param}': {problem['msg']}.", param=param)


def _param(location: Sequence[str | int]) -> str | None:
    """Dotted path of a field; tags of unions, written <tag>, are no part of the path."""
    parts = [str(part) for part in location[1:]]
    return ".".join(part for part in parts if not part.startswith("<")) or None
