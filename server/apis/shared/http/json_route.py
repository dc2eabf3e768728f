"""A route that reads its JSON body itself: strict JSON, bounded depth, errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from server.apis.shared.http.body_encoding import decompressed, utf8_text
from server.apis.shared.http.disconnect import ClientDisconnectedError
from server.errors import ApiError


class _JsonRequest(Request):
    """Holds the body that the route has already parsed."""

    parsed: Any = None

    async def json(self) -> Any:
        return self.parsed


class JsonRoute(APIRoute):
    """For endpoints whose body is one JSON object, compressed or not.

    FastAPI's own parser lets NaN through, hits the recursion limit on nested input and answers
    outside OpenAI's error shape.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            _require_json_type(request)
            parsing = _JsonRequest(request.scope, request.receive)
            try:
                body = await parsing.body()
            except ClientDisconnect:
                raise ClientDisconnectedError from None
            limit = request.app.state.context.config.limits.max_body_bytes
            encoding = request.headers.get("content-encoding", "")
            parsing.parsed = _parse(utf8_text(decompressed(body, encoding, limit)))
            return await handler(parsing)

        return handle


def _require_json_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"The Content-Type must be application/json, not {content_type or 'missing'!r}.",
            code="unsupported_media_type",
        )


def _parse(body: bytes) -> dict[str, Any]:
    if not body:
        raise ApiError(400, "The request body is empty; it must be a JSON object.")
    try:
        parsed = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    return parsed
