"""HTTP/1.1 as uvicorn speaks it, with an end to connections that send half a request."""

from __future__ import annotations

import asyncio
import logging
from enum import Enum, auto

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from engine.config import LimitsConfig
from server.errors import ApiError

logger = logging.getLogger(__name__)


class _Owed(Enum):
    """What the client must send before a time is over."""

    NOTHING = auto()
    HEAD = auto()
    """Of a first request, or the rest of one that has begun."""
    UNREAD_BODY = auto()
    """Of a request that has its answer."""


def make_protocol(limits: LimitsConfig) -> type[H11Protocol]:
    """A protocol class for uvicorn that keeps to `header_timeout` and `body_timeout`.

    A body that the app waits for is timed by `server.middleware.body_limit`, whose answer is logged
    and has the shape of the API.
    """

    class TimedProtocol(_TimedProtocol):
        header_timeout = limits.header_timeout
        body_timeout = limits.body_timeout

    return TimedProtocol


class _TimedProtocol(H11Protocol):
    header_timeout: float
    body_timeout: float
    _owed: tuple[_Owed, object] = (_Owed.NOTHING, None)
    """And the latest request by then, so that two of the same kind are told apart."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _watch(self) -> None:
        """Start, keep or stop the timer, by what the client owes now."""
        owed = (self._what_is_owed(), self.cycle)
        if owed == self._owed:
            return
        self._owed = owed
        self._stop_timer()
        if owed[0] is _Owed.HEAD:
            self._timer = self.loop.call_later(self.header_timeout, self._end_without_head)
        elif owed[0] is _Owed.UNREAD_BODY:
            self._timer = self.loop.call_later(self.body_timeout, self.transport.close)

    def _what_is_owed(self) -> _Owed:
        if self.transport.is_closing():
            return _Owed.NOTHING
        if self.conn.their_state is h11.IDLE:
            # An idle connection that has had an answer is uvicorn's to end, after its keep-alive.
            return _Owed.HEAD if self.cycle is None or self._has_begun() else _Owed.NOTHING
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            return _Owed.UNREAD_BODY
        return _Owed.NOTHING

    def _has_begun(self) -> bool:
        received, _ = self.conn.trailing_data
        return bool(received)

    def _end_without_head(self) -> None:
        logger.debug("a request head was not complete within %g s", self.header_timeout)
        if not self._has_begun():
            self.transport.close()
            return
        message = f"The request head took longer than the limit of {self.header_timeout:g} s."
        self._refuse(ApiError(408, message, code="header_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the app, unless its own answer has begun, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = error.body.to_json().encode()
        head = h11.Response(
            status_code=error.status,
            reason=STATUS_PHRASES[error.status],
            headers=[
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ],
        )
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
