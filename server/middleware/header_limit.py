"""ASGI middleware: a request with too many or too large headers is answered 431."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError

_LINE_BYTES = len(": \r\n")


class HeaderLimitMiddleware:
    """Headers that come in one piece pass uvicorn's own limit, which is on incomplete ones."""

    def __init__(self, app: ASGIApp, *, max_headers: int, max_bytes: int) -> None:
        """
        Args:
            max_bytes: of the request line and all headers together.
        """
        self._app = app
        self._max_headers = max_headers
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = None if scope["type"] != "http" else self._problem(scope)
        if problem is None:
            await self._app(scope, receive, send)
        else:
            error = ApiError(431, problem, code="request_headers_too_large")
            await error.to_response(scope["path"])(scope, receive, send)

    def _problem(self, scope: Scope) -> str | None:
        headers = scope["headers"]
        if len(headers) > self._max_headers:
            return f"The request has {len(headers)} headers; the limit is {self._max_headers}."
        size = len(scope.get("raw_path", b"")) + len(scope.get("query_string", b""))
        size += sum(len(name) + len(value) + _LINE_BYTES for name, value in headers)
        if size > self._max_bytes:
            return (
                f"The request line and headers have {size} bytes; the limit is {self._max_bytes}."
            )
        return None
