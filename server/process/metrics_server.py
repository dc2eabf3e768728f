"""/metrics on a port of its own, without API keys."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware
from starlette.routing import Route

from engine.config import Config
from server.apis.operation import metrics
from server.errors import add_error_handlers
from server.middleware.head import HeadMiddleware
from server.middleware.slashes import SlashesMiddleware
from server.process.uvicorn_config import uvicorn_config

_SHUTDOWN_SECONDS = 1


class _MetricsServer(uvicorn.Server):
    """Leaves the signals to the main server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def metrics_app(registry: CollectorRegistry) -> FastAPI:
    app = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        middleware=[Middleware(SlashesMiddleware), Middleware(HeadMiddleware)],
    )
    app.state.metrics_registry = registry
    app.include_router(metrics.router)
    add_error_handlers(app, [r for r in metrics.router.routes if isinstance(r, Route)])
    return app


@contextlib.asynccontextmanager
async def metrics_served(
    registry: CollectorRegistry, config: Config, listener: socket.socket | None
) -> AsyncIterator[None]:
    """Serve the metrics on a listener, if there is one, until the block ends."""
    if listener is None:
        yield
        return
    options = uvicorn_config(metrics_app(registry), config, shutdown_seconds=_SHUTDOWN_SECONDS)
    server = _MetricsServer(options)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
