"""ASGI middleware: a request body that is too large is answered 413, one that is too slow 408."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, body_too_large


class BodyLimitMiddleware:
    """Counts body bytes as they arrive; a wrong or missing Content-Length changes nothing."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout: float) -> None:
        """
        Args:
            timeout: seconds from the end of the head to the end of the body.
        """
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await body_too_large(self._max_bytes).to_response(scope["path"])(scope, receive, send)
            return
        num_received = 0
        deadline: float | None = asyncio.get_running_loop().time() + self._timeout

        async def receive_counted() -> Message:
            nonlocal num_received, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            num_received += len(message.get("body", b""))
            if num_received > self._max_bytes:
                raise body_too_large(self._max_bytes)
            if not message.get("more_body", False):
                deadline = None  # from here on the app waits for the client to go away
            return message

        await self._app(scope, receive_counted, send)

    def _too_slow(self) -> ApiError:
        """The connection ends with it: what is still to come of the body is of no use."""
        return ApiError(
            408,
            f"The request body took longer than the limit of {self._timeout:g} s.",
            code="body_timeout",
            headers={"Connection": "close"},
        )
