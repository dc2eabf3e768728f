"""Logging of the server's process: one line an event on stderr, for people or as JSON.

A record may carry two things beside its message, through `extra`: `fields`, which the JSON format
adds to the object, and `details`, text that the console format prints below the line.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from engine.config import LogFormat
from server.observability.request_record import current_request_id


class RequestIdFilter(logging.Filter):
    """Gives every record `request_id`, that of the request it is about, or an empty text."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = getattr(record, "request_id", "") or current_request_id.get()
        return True


class ConsoleFormatter(logging.Formatter):
    """``time LEVEL logger [request id]: message``, then details and traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(place)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", "")
        record.place = f" [{request_id}]" if request_id else ""
        details = getattr(record, "details", "")
        return super().formatMessage(record) + (f"\n{details}" if details else "")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            values["request_id"] = request_id
        values |= getattr(record, "fields", {})
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=False, default=str)


def configure_logging(level: str, log_format: LogFormat = "console") -> None:
    """Log to stderr. `level` is one of the configuration's log levels."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(JsonFormatter() if log_format == "json" else ConsoleFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # Their lines would tell the clients' addresses, or drown the rest.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if level != "debug":
        for name in ("httpx", "httpcore", "opentelemetry"):
            logging.getLogger(name).setLevel(logging.WARNING)
