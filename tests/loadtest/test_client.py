from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

import httpx
import pytest

from loadtest.client import Client, Record

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}


def chat_chunk(content: str | None, finish_reason: str | None = None) -> dict[str, Any]:
    delta = {"role": "assistant"} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def text_chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


class Lines(httpx.AsyncByteStream):
    """A body that arrives in one read an event."""

    def __init__(self, *events: Any) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()


Handler = Callable[[httpx.Request], httpx.Response]


def events(*events: Any) -> Handler:
    return lambda _: httpx.Response(200, stream=Lines(*events))


async def send(handler: Handler, *, body: Any = None, due: float | None = None) -> Record:
    """Send one request; the clock goes on by a second whenever it is read."""
    ticks = count(100)
    transport = httpx.MockTransport(handler)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        client = Client(http, {"model": "m"}, clock=lambda: float(next(ticks)))
        return await client.send("code", "/v1/chat/completions", body or {}, due)


async def test_times_each_chunk_with_text() -> None:
    # The clock: 100 at the start, 101 for the role, 103 for "ab", 105 for "c"; between them blanks.
    record = await send(
        events(
            chat_chunk(None), chat_chunk("ab"), chat_chunk("c"), chat_chunk("", "stop"), USAGE,
            "[DONE]",
        )
    )  # fmt: skip
    assert record.error is None
    assert record.text == "abc"
    assert record.finish_reason == "stop"
    assert (record.prompt_tokens, record.completion_tokens) == (7, 5)
    assert record.chunk_times == (103.0, 105.0)
    assert record.ttft == 3.0
    assert record.tpot == 2.0 / 4
    assert record.gaps == [2.0]
    assert record.e2e == record.ended - 100.0


async def test_reads_completions_too() -> None:
    record = await send(events(text_chunk("ab"), text_chunk("c", "length"), USAGE, "[DONE]"))
    assert (record.text, record.finish_reason, record.error) == ("abc", "length", None)


async def test_waiting_in_the_client_counts() -> None:
    record = await send(events(text_chunk("a", "stop"), USAGE, "[DONE]"), due=60.0)
    assert record.ttft == 40.0


async def test_asks_for_a_stream_with_usage() -> None:
    bodies = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, stream=Lines(text_chunk("a", "stop"), USAGE, "[DONE]"))

    await send(handler, body={"seed": 3})
    assert bodies == [
        {"model": "m", "seed": 3, "stream": True, "stream_options": {"include_usage": True}}
    ]


def fail_with(error: Exception) -> Handler:
    def handler(_: httpx.Request) -> httpx.Response:
        raise error

    return handler


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (
            lambda _: httpx.Response(429, json={"error": {"code": "queue_full"}}),
            "HTTP 429: queue_full",
        ),
        (
            lambda _: httpx.Response(400, json={"error": {"code": None, "type": "bad"}}),
            "HTTP 400: bad",
        ),
        (lambda _: httpx.Response(502, text="<html>"), "HTTP 502"),
        (lambda _: httpx.Response(500, json=["x"]), "HTTP 500"),
        (events(text_chunk("a"), {"error": {"code": "engine_dead"}}), "error event: engine_dead"),
        (events(text_chunk("a"), "{broken"), "malformed event"),
        (events(text_chunk("a")), "stream ended early"),
        (events(text_chunk("a"), USAGE, "[DONE]"), "stream ended early"),
        (events(text_chunk("a", "stop"), "[DONE]"), "no usage"),
        (events(text_chunk("a"), httpx.ReadTimeout("slow")), "timeout"),
        (events(text_chunk("a"), httpx.RemoteProtocolError("gone")), "connection lost"),
        (fail_with(httpx.ConnectError("nobody")), "connection refused"),
    ],
)
async def test_failures_have_a_kind(handler: Handler, kind: str) -> None:
    assert (await send(handler)).error == kind
