"""What derives from BaseException alone, as panics of Rust extensions do, raised in the server."""

from __future__ import annotations

import asyncio

import pytest

from server.apis.completions.render import CompletionRenderer
from server.apis.completions.schema import Completion
from server.errors import NO_FAULTS
from server.middleware.catch_all import CatchAllMiddleware
from tests.server.conftest import events_of


class Panic(BaseException):
    pass


def panic(*_, **__):
    raise Panic("unwrap of None, in text of a client")


async def test_in_a_route_it_is_a_500_that_tells_nothing(client, monkeypatch):
    monkeypatch.setattr(CompletionRenderer, "response", panic)
    response = await client.complete()
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "server_error"
    assert "unwrap" not in error["message"]


async def test_in_a_stream_it_is_an_error_event(client, engine, monkeypatch):
    monkeypatch.setattr(CompletionRenderer, "take", panic)
    response = await client.complete(stream=True)
    assert response.status_code == 200
    *_, last, rest = response.content.split(b"\n\n")
    assert rest == b""
    assert b'"type":"server_error"' in last.replace(b'": "', b'":"')
    assert engine.playing == {}, "the generation is closed"


async def test_in_one_of_several_choices_nothing_hangs(client, engine, monkeypatch):
    monkeypatch.setattr("engine.serving.async_engine.OutputStream.__anext__", panic)
    async with asyncio.timeout(5):
        response = await client.complete(n=2)
    assert response.status_code == 500
    assert engine.playing == {}


@pytest.mark.parametrize("ending", NO_FAULTS)
async def test_what_asks_for_an_end_is_none(ending):
    async def app(scope, receive, send):
        raise ending

    with pytest.raises(ending):
        await CatchAllMiddleware(app)({"type": "http", "path": "/"}, None, None)


async def test_a_stream_without_one_is_whole(client):
    assert len(events_of(await client.complete(stream=True))) > 1
    assert Completion.model_validate((await client.complete()).json())
