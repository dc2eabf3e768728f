"""ASGI middleware: a request body over the limit is answered 413, announced or not."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError


class BodyLimitMiddleware:
    """Counts body bytes as they arrive; a wrong or missing Content-Length changes nothing."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._error().to_response(scope["path"])(scope, receive, send)
            return
        num_received = 0

        async def receive_counted() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, receive_counted, send)

    def _error(self) -> ApiError:
        return ApiError(
            413,
            f"The request body is larger than the limit of {self._max_bytes} bytes.",
            code="request_too_large",
        )
