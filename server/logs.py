"""Logging of the server's process."""

from __future__ import annotations

import logging
import sys

from server.request_id import current_request_id


class RequestIdFilter(logging.Filter):
    """Gives every record `request_id`, in brackets, of the request it is about, if there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = current_request_id.get()
        record.request_id = f" [{request_id}]" if request_id else ""
        return True


def configure_logging(level: str) -> None:
    """One line an event on stderr. `level` is one of the configuration's log levels."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    logging.basicConfig(
        handlers=[handler],
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s%(request_id)s: %(message)s",
        force=True,
    )
    if level != "debug":
        # Their lines about every request and connection would drown the rest.
        for name in ("uvicorn", "httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)
