"""ASGI middleware: every response carries X-Request-Id, the client's own where it sent one."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.middleware.response_start import noting_start
from server.observability.request_record import current_request_id

HEADER = "X-Request-Id"
MAX_LENGTH = 128
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@-]")


def clean_request_id(value: str) -> str:
    """A client's id without what could forge log lines or headers; may be empty."""
    return _UNSAFE.sub("", value)[:MAX_LENGTH]


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = clean_request_id(Headers(scope=scope).get(HEADER, "")) or uuid.uuid4().hex
        current_request_id.set(request_id)

        def add_header(start: Message) -> None:
            MutableHeaders(scope=start)[HEADER] = request_id

        await self._app(scope, receive, noting_start(send, add_header))
