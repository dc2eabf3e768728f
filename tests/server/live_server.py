"""A real uvicorn server in a thread of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from engine.config import Config
from server.process.listener import listen
from server.process.uvicorn_config import uvicorn_config


@contextmanager
def live_server(app: Any, config: Config | None = None) -> Iterator[str]:
    """Serve an app on a free port; yields the URL."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(app, config or Config(), shutdown_seconds=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
    assert not thread.is_alive()


def wait_until(condition: Any, timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)
