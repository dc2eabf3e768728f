"""What the routes share: the engine and the configuration of one app."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Annotated

from fastapi import Depends, Request

from engine.config import Config
from engine.serving.async_engine import AsyncEngine
from server.apis.responses.store import ResponseStore
from server.errors import ApiError
from server.middleware.admission import OPEN_TICKET, TICKET, Admission, Ticket


@dataclass(frozen=True, slots=True)
class ServerContext:
    engine: AsyncEngine
    config: Config
    admission: Admission
    responses: ResponseStore = field(default_factory=ResponseStore)
    ticket: Ticket = OPEN_TICKET
    """The request's."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name the model is served under."""
        return self.config.served_names or (self.engine.card.name,)

    def require_model(self, name: str) -> None:
        """Raise a 404 `ApiError` unless the server has the model a client asks for."""
        if name not in self.model_names:
            known = ", ".join(repr(known) for known in self.model_names)
            raise ApiError(
                404,
                f"The model '{name}' does not exist; this server has {known}.",
                param="model",
                code="model_not_found",
            )

    def cache_scope(self, salt: str | None) -> str:
        """Among which requests cached prompt prefixes may be shared.

        Args:
            salt: of the request, if it has one.
        """
        shared = self.config.kv.prefix_cache_scope == "server"
        return json.dumps(["" if shared else self.ticket.client, salt or ""])


async def _context(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return replace(context, ticket=request.scope[TICKET])


Context = Annotated[ServerContext, Depends(_context)]
