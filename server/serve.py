"""Runs the app under uvicorn until a signal, a failed load or an error ends it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import uvicorn

from engine.async_engine import AsyncEngine, EngineState
from engine.config import Config, ConfigError
from server.api_keys import ApiKeys
from server.app import create_app
from server.http_options import http_options
from server.process import url_of
from server.startup import log_ready
from server.tracing import make_tracing

if TYPE_CHECKING:
    from engine.core import EngineCore

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 5.0
"""After a stop signal, requests in progress have this long to finish; then they end in an error."""


class LoadError(RuntimeError):
    """The model can't be loaded; the message is one readable line."""


def make_engine(config: Config) -> AsyncEngine:
    """An engine that loads its models when started, imports included, in its own thread."""

    def load() -> EngineCore:
        # Torch takes seconds to import; /health answers meanwhile.
        from engine.build import build_core

        return build_core(config)

    max_requests = config.scheduler.max_running + config.scheduler.max_waiting
    return AsyncEngine(load, max_requests=max_requests)


def serve(config: Config, engine: AsyncEngine, listener: socket.socket, keys: ApiKeys) -> None:
    """Serve until a stop signal.

    Raises:
        ConfigError: keys that don't fit the model or the machine.
        LoadError: the model can't be loaded.
    """
    asyncio.run(_serve(config, engine, listener, keys))
    if engine.state in (EngineState.LOADING, EngineState.READY):
        # A load, or a second signal: the engine's thread must not meet a half-ended interpreter.
        logging.shutdown()
        os._exit(0)


class _Server(uvicorn.Server):
    """Ends the requests that outlast the drain time with an error that their clients can read."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._stop_engine_after_drain())
        try:
            await super().shutdown(sockets)
        finally:
            draining.cancel()

    async def _stop_engine_after_drain(self) -> None:
        await asyncio.sleep(DRAIN_SECONDS)
        if self._engine.state is EngineState.READY:
            await self._engine.stop()


async def _serve(
    config: Config, engine: AsyncEngine, listener: socket.socket, keys: ApiKeys
) -> None:
    url = url_of(listener)
    tracing = make_tracing(config.tracing)
    failures: list[BaseException] = []

    def on_loaded(failure: BaseException | None) -> None:
        if failure is None:
            log_ready(engine.summary(), config, url)
        else:
            failures.append(failure)
            server.should_exit = True

    server = _Server(
        http_options(
            create_app(engine, config, keys=keys, tracing=tracing, on_loaded=on_loaded),
            config,
            shutdown_seconds=math.ceil(2 * DRAIN_SECONDS),
        ),
        engine,
    )
    logger.info("listening on %s, loading %s", url, config.model)
    with suppress(SystemExit):
        # Uvicorn raises the signal that stopped it once more when it is done.
        await server.serve(sockets=[listener])
    for failure in failures:
        if isinstance(failure, ConfigError):
            raise failure
        raise LoadError(_one_line(failure)) from failure


def _one_line(error: BaseException) -> str:
    """The message, with its type where the engine did not word it for people."""
    message = " ".join(str(error).split())
    if type(error).__module__.startswith("engine.") and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
