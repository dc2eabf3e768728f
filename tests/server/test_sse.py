"""Framing of server-sent events."""

from __future__ import annotations

import json

import httpx
import pytest

from server.schemas.common import ErrorDetail
from server.sse import encode_event
from tests.server.scripted_engine import words


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "two\nlines\r\n",
        "\r",
        "\x85 \u2028 \u2029",
        "\x0b\x0c\x1c\x1e",
        "data: x\n\n",
        "é\x00",
    ],
)
def test_one_event_is_one_line_by_any_reading(text):
    event = encode_event(ErrorDetail(message=text, type="t", param=None, code=None))
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    payload = event[len(b"data: ") : -2]
    assert len(payload.decode().splitlines()) == 1
    assert json.loads(payload)["message"] == text


async def test_headers(client):
    response = await client.complete(stream=True)
    assert response.headers["content-type"].split(";")[0] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers


async def test_line_ends_in_text_reach_a_line_reader_whole(app, engine):
    engine.script = lambda request: words("a\u2028b", "\x85\n\r", "c")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        body = {"model": "tiny/model", "prompt": "x", "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["choices"][0]["text"] for event in events) == "a\u2028b\x85\n\rc"
