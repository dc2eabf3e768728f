"""How uvicorn serves an app: what it reads, waits for and logs."""

from __future__ import annotations

import uvicorn
from starlette.types import ASGIApp

from engine.config import Config
from server.process.http_protocol import make_protocol

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that they never reuse one as it closes."""


def uvicorn_config(app: ASGIApp, config: Config, *, shutdown_seconds: int) -> uvicorn.Config:
    """
    Args:
        shutdown_seconds: time connections have to end after the last request has.
    """
    return uvicorn.Config(
        app,
        http=make_protocol(config.limits),
        h11_max_incomplete_event_size=config.limits.max_header_bytes,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # it has client addresses; AccessLogMiddleware logs requests
        ssl_certfile=None if config.ssl_certfile is None else str(config.ssl_certfile),
        ssl_keyfile=None if config.ssl_keyfile is None else str(config.ssl_keyfile),
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=shutdown_seconds,
    )
