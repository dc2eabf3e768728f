"""ASGI middleware: where no other origins are allowed, a browser's preflight is told why."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError, allowed_methods

_MESSAGE = (
    "This server answers no web pages of other origins; the configuration key 'cors.allow_origins' "
    "lists those that it answers."
)


class PreflightMiddleware:
    """Outside of the key check: browsers send preflights without the key."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        """
        Args:
            routes: all that the server has; they tell what a path allows.
        """
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = allowed_methods(self._routes, scope) if _is_preflight(scope) else ""
        if not allowed:
            await self._app(scope, receive, send)
            return
        headers = {"Allow": allowed}
        refusal = ApiError(405, _MESSAGE, code="cors_not_allowed", headers=headers)
        await refusal.to_response(scope["path"])(scope, receive, send)


def _is_preflight(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return False
    headers = Headers(scope=scope)
    return "origin" in headers and "access-control-request-method" in headers
