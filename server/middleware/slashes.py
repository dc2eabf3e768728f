"""ASGI middleware: spare slashes in a path, behind it or doubled, mean nothing."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_DOUBLED = re.compile("//+")


class SlashesMiddleware:
    """Stands in front of all that decides by the path, so that all decide by the same one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            path = _DOUBLED.sub("/", scope["path"])
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)
