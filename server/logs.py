"""Logging of the server's process."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str) -> None:
    """One line an event on stderr. `level` is one of the configuration's log levels."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    if level != "debug":
        # Their lines about every request and connection would drown the rest.
        for name in ("uvicorn", "httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)
