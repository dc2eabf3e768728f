"""Server-sent events: framing and a response that stops when its client goes away."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.disconnect import ClientDisconnectedError, run_until_disconnect
from server.errors import to_api_error
from server.schemas.common import ResponseModel

DONE = b"data: [DONE]\n\n"

# Legal inside an event, but many clients split lines wherever Unicode does.
_UNICODE_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


def encode_event(data: ResponseModel) -> bytes:
    """One event with a JSON payload, on a single line by any client's reading."""
    payload = data.to_json().encode()
    for line_end, escape in _UNICODE_LINE_ENDS.items():
        payload = payload.replace(line_end, escape)
    return b"data: " + payload + b"\n\n"


class EventStream(StreamingResponse):
    """Streams events; an error in mid-stream becomes an error event and ends the stream.

    `on_close` runs when the response is over, for whatever reason, also before the first event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None]) -> None:
        self._events = _with_error_event(events)
        self._on_close = on_close
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnectedError):
                await run_until_disconnect(receive, self._send_all(send))
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events):
            await self.stream_response(send)


async def _with_error_event(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except Exception as error:
            yield encode_event(to_api_error(error).body)
