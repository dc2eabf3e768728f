from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.config import Config
from server.app import create_app
from tests.server.scripted_engine import ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def config() -> Config:
    return Config(
        limits={
            "max_body_bytes": 4096,
            "max_prompts": 4,
            "max_choices": 3,
            "max_logprobs": 3,
            "max_stops": 2,
            "max_schema_bytes": 2048,
        }
    )


@pytest.fixture
def app(engine: ScriptedEngine, config: Config) -> FastAPI:
    return create_app(engine, config)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[Client]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield Client(http)


class Client:
    """Posts to the app with the fields that every request needs filled in."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny/model", "prompt": "Say hello", **fields}
        return await self.http.post("/v1/completions", json=body)

    async def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Say hello"}]
        body = {"model": "tiny/model", "messages": messages, **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete_stream(self, **fields: Any) -> list[dict[str, Any]]:
        return events_of(await self.complete(stream=True, **fields))

    async def chat_stream(self, **fields: Any) -> list[dict[str, Any]]:
        return events_of(await self.chat(stream=True, **fields))


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a finished stream, which must be framed as OpenAI frames it."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") and b"\n" not in event for event in events)
    return [json.loads(event.removeprefix(b"data: ")) for event in events]
