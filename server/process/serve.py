"""Runs the app under uvicorn until a signal, a failed load or an error ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.routing import Match

from engine.config import Config, ConfigError
from engine.serving.async_engine import AsyncEngine
from server.app import create_app
from server.context import ServerContext
from server.middleware.api_keys import ApiKeys
from server.observability.load_progress import showing_progress
from server.observability.start_summary import log_ready
from server.observability.tracing import make_tracing
from server.process.drain import DrainingServer
from server.process.listener import url_of
from server.process.load_errors import load_failure
from server.process.metrics_server import metrics_served
from server.process.uvicorn_config import uvicorn_config

if TYPE_CHECKING:
    from engine.core import EngineCore

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 5
"""For connections to take the rest of their answers, when no request is in progress any more."""


class LoadError(RuntimeError):
    """The model can't be loaded; the message is one readable line."""


def make_engine(config: Config) -> AsyncEngine:
    """An engine that loads its models when started, imports included, in its own thread."""

    def load() -> Callable[[], EngineCore]:
        # Torch takes seconds to import; /health answers meanwhile.
        from engine.build import load_engine

        with showing_progress(config.log_format):
            make_core = load_engine(config)
        return lambda: _warmed_up(make_core, config)

    max_requests = config.scheduler.max_running + config.scheduler.max_waiting
    return AsyncEngine(load, max_requests=max_requests, recovery=config.recovery)


def _warmed_up(make_core: Callable[[], EngineCore], config: Config) -> EngineCore:
    with showing_progress(config.log_format):
        return make_core()


def serve(
    config: Config,
    engine: AsyncEngine,
    listener: socket.socket,
    keys: ApiKeys,
    metrics_listener: socket.socket | None = None,
) -> None:
    """Serve until a stop signal.

    Args:
        metrics_listener: for /metrics alone; None: it is with everything else.

    Raises:
        ConfigError: keys that don't fit the model or the machine.
        LoadError: the model can't be loaded.
    """
    asyncio.run(_serve(config, engine, listener, keys, metrics_listener))
    if not engine.state.has_ended:
        # A load, a step that hangs, a second signal: the engine's thread must not meet a half-ended
        # interpreter.
        logging.shutdown()
        os._exit(0)


def serves(app: FastAPI, path: str) -> bool:
    """Whether a GET of the path is answered by some route."""
    scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


async def _serve(
    config: Config,
    engine: AsyncEngine,
    listener: socket.socket,
    keys: ApiKeys,
    metrics_listener: socket.socket | None,
) -> None:
    tls = config.ssl_certfile is not None
    url = url_of(listener, tls=tls)
    tracing = make_tracing(config.tracing)
    failures: list[BaseException] = []

    def on_loaded(failure: BaseException | None) -> None:
        if failure is None:
            log_ready(
                engine.summary(),
                config,
                url,
                needs_key=len(keys) > 0,
                has_page=serves(app, "/"),
            )
        else:
            failures.append(failure)
            server.should_exit = True

    app = create_app(engine, config, keys=keys, tracing=tracing, on_loaded=on_loaded)
    context: ServerContext = app.state.context
    server = DrainingServer(
        uvicorn_config(app, config, shutdown_seconds=SHUTDOWN_SECONDS),
        engine,
        context.admission,
        config.admission.drain_timeout,
    )
    logger.info("listening on %s, loading %s", url, config.model)
    if metrics_listener is not None:
        logger.info("metrics on %s/metrics", url_of(metrics_listener, tls=tls))
    async with metrics_served(app.state.metrics_registry, config, metrics_listener):
        with suppress(SystemExit):
            # Uvicorn raises the signal that stopped it once more when it is done.
            await server.serve(sockets=[listener])
    for failure in failures:
        if isinstance(failure, ConfigError):
            raise failure
        raise LoadError(load_failure(failure)) from failure
