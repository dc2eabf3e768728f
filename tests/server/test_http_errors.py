"""Routing, limits, engine failures and request ids."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from engine.request import FinishReason
from engine.serving.async_engine import EngineState
from server.app import create_app
from server.errors import INTERNAL_ERROR
from server.observability.logs import RequestIdFilter
from tests.server.live_server import live_server
from tests.server.scripted_engine import ScriptedEngine, Step, words


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("kind", ["complete", "chat"])
async def test_unknown_model(client, kind):
    response = await getattr(client, kind)(model="gpt-4")
    assert response.status_code == 404
    error = error_of(response)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "'gpt-4'" in error["message"]


async def test_models(client):
    listed = (await client.http.get("/v1/models")).json()
    model = {
        "id": "tiny/model",
        "object": "model",
        "created": 1700000000,
        "owned_by": "slipstream",
        "max_model_len": 128,
    }
    assert listed == {"object": "list", "data": [model]}
    assert (await client.http.get("/v1/models/tiny/model")).json() == model
    response = await client.http.get("/v1/models/tiny/other")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completion", "/v1/embeddings", "/v2/models"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_unknown_route(client, method, path):
    response = await client.http.request(method, path)
    assert response.status_code == 404
    error = error_of(response)
    assert error["code"] == "unknown_url"
    assert error["message"] == f"Unknown request URL: {method} {path}."


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("HEAD", "/v1/completions", "POST"),
        ("PUT", "/health", "GET, HEAD"),
        ("OPTIONS", "/v1/responses/r", "DELETE, GET, HEAD"),
        ("POST", "/v1/responses/r", "DELETE, GET, HEAD"),
    ],
)
async def test_wrong_method(client, method, path, allowed):
    response = await client.http.request(method, path)
    assert response.status_code == 405
    if method != "HEAD":
        assert error_of(response)["code"] == "method_not_allowed"
    assert response.headers["allow"] == allowed


async def test_body_over_the_limit_by_its_announced_length(client):
    response = await client.complete(prompt="x" * 5000)
    assert response.status_code == 413
    error = error_of(response)
    assert error["code"] == "request_too_large"
    assert "4096 bytes" in error["message"]


async def test_body_of_exactly_the_limit_is_read(client, engine):
    engine.max_context = 5000
    frame = len(json.dumps({"model": "tiny/model", "prompt": ""}))
    body = json.dumps({"model": "tiny/model", "prompt": "x" * (4096 - frame)})
    headers = {"content-type": "application/json"}
    response = await client.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 200
    response = await client.http.post("/v1/completions", content=body + " ", headers=headers)
    assert response.status_code == 413


async def test_body_over_the_limit_without_a_length(client):
    num_sent = 0

    async def chunks():
        nonlocal num_sent
        for _ in range(1000):
            num_sent += 1
            yield b" " * 1024

    response = await client.http.post(
        "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert num_sent == 5


def test_body_over_the_limit_over_a_socket(app):
    headers = {"content-type": "application/json"}
    with live_server(app) as url, httpx.Client(base_url=url) as http:
        for content in (b" " * (8 << 20), iter([b" " * (1 << 20)] * 8)):
            response = http.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 413
            assert error_of(response)["code"] == "request_too_large"
        body = {"model": "tiny/model", "prompt": "a"}
        assert http.post("/v1/completions", json=body).status_code == 200


async def test_full_queue(client, engine):
    engine.max_requests = 2
    response = await client.complete(n=3)
    assert response.status_code == 429
    error = error_of(response)
    assert error["type"] == "rate_limit_error"
    assert error["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1
    assert len(engine.aborted) == 2
    assert (await client.complete(n=2)).status_code == 200


@pytest.mark.parametrize("state", [EngineState.LOADING, EngineState.DEAD, EngineState.STOPPED])
async def test_engine_that_is_not_ready(client, engine, state):
    engine.state, engine.failure = state, "secret detail"
    for response in (
        await client.complete(),
        await client.complete(stream=True),
        await client.chat(),
        await client.http.get("/v1/models"),
        await client.http.get("/v1/models/x"),
    ):
        assert response.status_code == 503
        error = error_of(response)
        assert error["type"] == "server_error"
        assert error["code"] == "engine_unavailable"
        assert "secret" not in response.text


async def test_health(client, engine):
    async def health():
        response = await client.http.get("/health")
        return response.status_code, response.json()

    assert await health() == (200, {"status": "ok"})
    engine.state = EngineState.LOADING
    assert await health() == (503, {"status": "loading"})
    engine.state, engine.failure = EngineState.DEAD, "RuntimeError: out of memory"
    assert await health() == (503, {"status": "dead", "reason": "RuntimeError: out of memory"})


@pytest.mark.parametrize("kind", ["complete", "chat"])
async def test_unforeseen_error_tells_no_internals(client, engine, caplog, kind):
    def broken(*arguments, **options):
        raise LookupError("secret detail")

    engine.submit = broken
    response = await getattr(client, kind)()
    assert response.status_code == 500
    error = error_of(response)
    assert error["type"] == "server_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"]
    assert "LookupError raised in" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("state", "status"), [(EngineState.READY, 500), (EngineState.DEAD, 503)])
async def test_engine_gives_a_request_up(client, engine, state, status):
    def script(request):
        engine.state = state
        return [*words("a", finish=None), Step("", (), FinishReason.ERROR, error="It broke.")]

    engine.script = script
    response = await client.complete(n=2)
    assert response.status_code == status
    assert error_of(response)["message"] == "It broke."
    assert engine.num_requests == 0


@pytest.mark.parametrize("kind", ["complete", "chat"])
@pytest.mark.parametrize("n", [1, 2])
async def test_engine_gives_a_streamed_request_up(client, engine, kind, n):
    engine.script = lambda request: [
        *words("a", "b", finish=None),
        Step("", (), FinishReason.ERROR, error="It broke."),
    ]
    response = await getattr(client, kind)(stream=True, n=n)
    assert response.status_code == 200
    *events, error_event, rest = response.content.split(b"\n\n")
    assert rest == b""
    assert b"[DONE]" not in response.content
    assert all(b'"choices"' in event for event in events)
    error = json.loads(error_event.removeprefix(b"data: "))["error"]
    assert error == {
        "message": "It broke.",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }
    assert engine.num_requests == 0


async def test_unforeseen_error_in_mid_stream(client, engine):
    engine.script = lambda request: [*words("a", finish=None), Step(5, (b"x",))]
    response = await client.complete(stream=True)
    last = response.content.split(b"\n\n")[-2]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["type"] == "server_error"
    assert error["message"] == INTERNAL_ERROR
    assert engine.num_requests == 0


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere", "/metrics"])
async def test_request_id_is_made(client, path):
    first = (await client.http.get(path)).headers["x-request-id"]
    second = (await client.http.get(path)).headers["x-request-id"]
    assert first
    assert first != second


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-123_x.y:z/9", "abc-123_x.y:z/9"), ("a b\tc;<d>", "abcd"), ("x" * 500, "x" * 128)],
)
async def test_clients_request_id_is_kept_without_what_is_unsafe(client, given, kept):
    headers = {"X-Request-Id": given}
    assert (await client.http.get("/health", headers=headers)).headers["x-request-id"] == kept
    response = await client.http.post("/v1/completions", headers=headers, content=b"x")
    assert response.status_code == 415
    assert response.headers["x-request-id"] == kept


async def test_request_id_on_streams_and_large_bodies(client):
    assert (await client.complete(stream=True)).headers["x-request-id"]
    response = await client.complete(prompt="x" * 5000)
    assert response.status_code == 413
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("kind", ["complete", "chat"])
async def test_request_id_on_log_lines(client, engine, kind, caplog):
    caplog.handler.addFilter(RequestIdFilter())
    engine.submit = None
    client.http.headers["X-Request-Id"] = "my-id"
    assert (await getattr(client, kind)()).status_code == 500
    assert [record.request_id for record in caplog.records] == ["my-id"]


async def test_log_lines_of_a_stream_have_the_id_of_their_own_request(client, engine, caplog):
    caplog.handler.addFilter(RequestIdFilter())
    engine.script = lambda request: [*words("a", finish=None), Step(5, (b"x",))]
    responses = await asyncio.gather(
        *(
            client.http.post(
                "/v1/completions",
                json={"model": "tiny/model", "prompt": "x", "stream": True},
                headers={"X-Request-Id": f"id-{number}"},
            )
            for number in range(3)
        )
    )
    assert all(b"error" in response.content for response in responses)
    assert {record.request_id for record in caplog.records} == {"id-0", "id-1", "id-2"}


async def test_openapi_describes_the_bodies(client):
    document = (await client.http.get("/openapi.json")).json()
    operation = document["paths"]["/v1/chat/completions"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["$ref"].endswith("/ChatRequest")
    answers = operation["responses"]["200"]["content"]
    assert set(answers) == {"application/json", "text/event-stream"}
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]


def test_lifespan_loads_and_stops_the_engine(config):
    engine = ScriptedEngine(state=EngineState.LOADING)
    told: list[Exception | None] = []
    with live_server(create_app(engine, config, on_loaded=told.append)) as url:
        assert httpx.get(f"{url}/health").status_code == 200
    assert told == [None]
    assert engine.state is EngineState.STOPPED


def test_lifespan_tells_why_a_load_failed(config):
    failure = RuntimeError("no such model")
    engine = ScriptedEngine(state=EngineState.LOADING, load_error=failure)
    told: list[Exception | None] = []
    with live_server(create_app(engine, config, on_loaded=told.append)) as url:
        response = httpx.get(f"{url}/health")
        assert response.status_code == 503
        assert response.json() == {"status": "dead", "reason": "no such model"}
    assert told == [failure]
