"""ASGI middleware: a header tells a client what its schemas demand beyond what is enforced."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.middleware.response_start import noting_start
from server.observability.request_record import current_record

HEADER = "X-Schema-Not-Enforced"
_MAX_LENGTH = 1000
_MORE = ", ..."


class NotEnforcedHeaderMiddleware:
    """Stands inside of the access log, whose record of a request holds what is not enforced."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = current_record.get()
        if scope["type"] != "http" or record is None:
            await self._app(scope, receive, send)
            return

        def add_header(start: Message) -> None:
            if record.not_enforced:
                MutableHeaders(scope=start)[HEADER] = header_value(record.not_enforced)

        await self._app(scope, receive, noting_start(send, add_header))


def header_value(keywords: Sequence[str]) -> str:
    """Fields and JSON pointers in them, such as ``guided_json#/not``, as many as fit."""
    told = ""
    for keyword in dict.fromkeys(keywords):
        longer = told + (", " if told else "") + quote(keyword, safe="/#$.~")
        if len(longer) + len(_MORE) > _MAX_LENGTH:
            return (told + _MORE).removeprefix(", ")
        told = longer
    return told
