"""ASGI middleware: an unforeseen exception becomes a 500 that tells the client no internals."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import NO_FAULTS, to_api_error
from server.middleware.response_start import noting_start


class BrokenResponseError(RuntimeError):
    """A response had begun when something failed: the connection must be cut. It is in the log."""


class CatchAllMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        def note_start(_: Message) -> None:
            nonlocal started
            started = True

        try:
            await self._app(scope, receive, noting_start(send, note_start))
        except NO_FAULTS:
            raise
        except BaseException as error:
            answer = to_api_error(error)
            if started:
                raise BrokenResponseError from None
            await answer.to_response(scope["path"])(scope, receive, send)
