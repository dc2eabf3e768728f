"""Framing of server-sent events."""

from __future__ import annotations

import json

import httpx
import pytest

from engine.request import FinishReason
from server.apis.shared.http import sse
from server.apis.shared.http.sse import encode_event
from server.apis.shared.schema.error import ErrorDetail
from tests.server.scripted_engine import Step, words


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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_silence_is_broken_by_comments(client, engine, monkeypatch, path):
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    engine.pace = 0.1
    kind = client.chat if path.endswith("chat/completions") else client.complete
    response = await kind(stream=True)
    blocks = response.content.split(b"\n\n")
    pings = [block for block in blocks if block == b": ping"]
    assert len(pings) >= 4
    events = [json.loads(b[6:]) for b in blocks if b.startswith(b"data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert blocks[-2:] == [b"data: [DONE]", b""]


async def test_no_comments_without_silence(client):
    assert b": ping" not in (await client.complete(stream=True)).content


async def test_error_behind_a_silence_still_ends_the_stream(client, engine, monkeypatch):
    monkeypatch.setattr(sse, "PING_SECONDS", 0.01)
    engine.pace = 0.05
    engine.script = lambda request: [
        *words("a", finish=None),
        Step("", (), FinishReason.ERROR, error="It broke."),
    ]
    blocks = (await client.complete(stream=True)).content.split(b"\n\n")
    assert b": ping" in blocks
    assert b"It broke." in blocks[-2]
    assert engine.num_requests == 0
