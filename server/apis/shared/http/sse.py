"""Server-sent events: framing and a response that stops when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.apis.shared.http.disconnect import ClientDisconnectedError, run_until_disconnect
from server.apis.shared.schema.base import NamedEvent, ResponseModel
from server.errors import NO_FAULTS, ApiError, to_api_error

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
PING_SECONDS = 15.0
"""Silence after which a stream sends a comment, well under the usual 30 to 60 of proxies."""

# Legal inside an event, but many clients split lines wherever Unicode does.
_UNICODE_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


def encode_event(data: ResponseModel) -> bytes:
    """One event with a JSON payload, on a single line by any client's reading."""
    payload = data.to_json().encode()
    for line_end, escape in _UNICODE_LINE_ENDS.items():
        payload = payload.replace(line_end, escape)
    name = f"event: {data.type}\n".encode() if isinstance(data, NamedEvent) else b""
    return name + b"data: " + payload + b"\n\n"


class EventStream(StreamingResponse):
    """Streams events; an error in mid-stream becomes an error event and ends the stream.

    `on_close` runs when the response is over, for whatever reason, also before the first event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_failure: Callable[[ApiError], Iterable[ResponseModel]],
        on_close: Callable[[], None],
    ) -> None:
        """
        Args:
            on_failure: the events that tell of an error in mid-stream.
        """
        self._events = _with_pings(_with_error_event(events, on_failure), PING_SECONDS)
        self._on_close = on_close
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnectedError):
                await run_until_disconnect(receive, self._send_all(send))
        finally:
            self.close()

    def close(self) -> None:
        """Also for a response that is never sent."""
        self._on_close()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events):
            await self.stream_response(send)


async def _with_error_event(
    events: AsyncGenerator[bytes, None], on_failure: Callable[[ApiError], Iterable[ResponseModel]]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except NO_FAULTS:
            raise
        except BaseException as error:
            for message in on_failure(to_api_error(error)):
                yield encode_event(message)


async def _with_pings(
    events: AsyncGenerator[bytes, None], seconds: float
) -> AsyncGenerator[bytes, None]:
    """The events, with a comment after every silence of so many seconds.

    Proxies and clients take a long silence, such as a long prompt's, for a dead connection.
    """
    coming: asyncio.Task[bytes] | None = None
    try:
        while True:
            coming = coming or asyncio.create_task(_next(events))
            done, _ = await asyncio.wait({coming}, timeout=seconds)
            if not done:
                yield PING
                continue
            finished, coming = coming, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)
