"""ASGI middleware: without an API key nothing but /health is answered."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError
from server.middleware.api_keys import ApiKeys

OPEN_PATHS = frozenset({"/health"})
CLIENT = "slipstream.client"
"""Key of the ASGI scope: name of the client whose API key the request has."""
_POLICY_VIOLATION = 1008


class ApiKeyMiddleware:
    """Lets a request through when it has one of the keys, and notes in the scope whose it is.

    The path it decides by is the one the router decides by: nothing a client writes into Host or a
    forwarding header can make them differ.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not len(self._keys):
            await self._app(scope, receive, send)
            return
        client = self._client(scope)
        if client is not None:
            await self._app({**scope, CLIENT: client}, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        elif scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        else:
            await _refusal(scope).to_response(scope["path"])(scope, receive, send)

    def _client(self, scope: Scope) -> str | None:
        clients = [self._keys.client_of(key) for key in _presented_keys(scope)]
        return next((client for client in clients if client is not None), None)


def _presented_keys(scope: Scope) -> Iterator[bytes]:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            yield rest.strip() if scheme.lower() == b"bearer" and rest else value.strip()
        elif name == b"x-api-key":
            yield value.strip()


def _refusal(scope: Scope) -> ApiError:
    has_key = any(True for _ in _presented_keys(scope))
    return ApiError(
        401,
        "The API key is not valid."
        if has_key
        else "An API key is required: send it in the header 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
