"""ASGI middleware: one log line, one count and one trace for every HTTP request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Protocol

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.middleware.response_start import noting_start
from server.observability.http_counts import HttpCounts
from server.observability.request_record import (
    RequestRecord,
    current_record,
    current_request_id,
)

logger = logging.getLogger(__name__)

OTHER = "other"
"""Label of a path or a method that is none of the server's: clients can't invent labels."""
CLIENT_CLOSED = 499
"""Status under which a request is counted whose client went away before the answer began."""
_QUIET = frozenset({"/health", "/metrics"})
"""Asked every few seconds by probes and by Prometheus."""
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})


class TraceSink(Protocol):
    """Takes the requests that are over."""

    def export(self, record: RequestRecord, scope: Scope, started: float) -> None:
        """
        Args:
            scope: of the request; holds the trace context that the client sent.
            started: when the request came, by `time.monotonic`.
        """
        ...


class AccessLogMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Iterable[Route],
        counts: HttpCounts,
        traces: TraceSink | None,
    ) -> None:
        """
        Args:
            routes: all that the server has, for the names they are counted under.
            traces: None: no traces are wanted.
        """
        self._app = app
        self._routes = tuple(routes)
        self._counts = counts
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        record = RequestRecord(current_request_id.get(), method, self._route(scope))
        current_record.set(record)

        def note_status(start: Message) -> None:
            record.status = start["status"]

        started = time.monotonic()
        self._counts.in_progress += 1
        try:
            await self._app(scope, receive, noting_start(send, note_status))
        finally:
            self._counts.in_progress -= 1
            record.seconds = time.monotonic() - started
            status = str(record.status or CLIENT_CLOSED)
            self._counts.answered[method, record.route, status] += 1
            _log(record)
            if self._traces is not None and record.route not in _QUIET:
                self._traces.export(record, scope, started)

    def _route(self, scope: Scope) -> str:
        partial = OTHER
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return route.path_format
            if match is Match.PARTIAL:
                partial = route.path_format
        return partial


def _log(record: RequestRecord) -> None:
    level = logging.DEBUG if record.route in _QUIET else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields = record.fields()
    parts = [f"{record.method} {record.route} {record.status or CLIENT_CLOSED}"]
    parts.append(f"in {record.seconds:.3f} s")
    if record.operation:
        parts.append("with {prompt_tokens} + {output_tokens} tokens".format(**fields))
    logger.log(level, " ".join(parts), extra={"fields": fields})
