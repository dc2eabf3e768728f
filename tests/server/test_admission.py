"""Concurrency limits, priorities, deadlines and draining, over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import httpx
import openai
import pytest

from engine.config import AdmissionConfig, Config
from engine.request import QUEUE_TIMEOUT, FinishReason
from server.app import create_app
from server.errors import ApiError
from server.middleware.admission import Admission
from server.middleware.api_keys import ApiKeys
from tests.server.live_server import live_server, wait_until
from tests.server.scripted_engine import Step

BODY: dict[str, Any] = {"model": "tiny/model", "prompt": "a"}
ANN, BEN = {"x-api-key": "ann-key"}, {"x-api-key": "ben-key"}
KEYS = ApiKeys(
    {
        hashlib.sha256(key).digest(): name
        for key, name in ((b"ann-key", "ann"), (b"ann-second", "ann"), (b"ben-key", "ben"))
    }
)


def make_client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


def admission_of(app) -> Admission:
    return app.state.context.admission


def make_app(engine, keys: ApiKeys | None = None, **admission):
    return create_app(engine, Config(admission=admission), keys=keys)


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def assert_refused(response, status, code, kind) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["type"], error["param"]) == (code, kind, None)
    assert int(response.headers["retry-after"]) >= 1


class TestConcurrency:
    async def test_of_all_clients(self, engine):
        engine.hold_after = 1
        app = make_app(engine, max_requests=2)
        async with make_client(app) as http:
            held = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(2)]
            await until(lambda: engine.num_requests == 2)
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/responses"):
                assert_refused(
                    await http.post(path, json=BODY), 429, "queue_full", "rate_limit_error"
                )
            response = await http.post("/v1/messages", json=BODY)
            assert response.status_code == 429
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert (await http.get("/v1/models")).status_code == 200
            assert (await http.get("/health")).status_code == 200
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            engine.hold_after = None
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        assert admission_of(app).num_requests == 0

    async def test_of_one_client_whichever_of_its_keys_it_uses(self, engine):
        engine.hold_after = 1
        app = make_app(engine, KEYS, max_requests_per_key=1)
        async with make_client(app) as http:
            held = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=ANN))
            await until(lambda: engine.num_requests == 1)
            for key in ("ann-key", "ann-second"):
                response = await http.post(
                    "/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"}
                )
                assert_refused(response, 429, "rate_limit_exceeded", "rate_limit_error")
            engine.hold_after = None
            response = await http.post("/v1/completions", json=BODY, headers=BEN)
            assert response.status_code == 200
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
            response = await http.post("/v1/completions", json=BODY, headers=ANN)
            assert response.status_code == 200

    async def test_who_has_no_key_takes_nobodys_place(self, engine):
        app = make_app(engine, KEYS, max_requests=1)
        async with make_client(app) as http:
            for _ in range(3):
                assert (await http.post("/v1/completions", json=BODY)).status_code == 401
            response = await http.post("/v1/completions", json=BODY, headers=ANN)
            assert response.status_code == 200

    def test_a_stream_counts_to_its_end_however_it_ends(self, engine):
        engine.hold_after = 1
        app = make_app(engine, max_requests=1)
        admission = admission_of(app)
        with live_server(app) as url, httpx.Client(base_url=url) as http:
            with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
                lines = response.iter_lines()
                assert "Hello" in next(lines)
                assert admission.num_requests == 1
                assert http.post("/v1/completions", json=BODY).status_code == 429
            wait_until(lambda: admission.num_requests == 0)
            assert http.post("/tokenize", json=BODY).status_code == 200

    @pytest.mark.parametrize("content", [b"", b"{", b" " * 5_000_000, b'{"model": 1}'])
    async def test_a_refused_request_gives_its_place_back(self, engine, content):
        app = make_app(engine, max_requests=1)
        async with make_client(app) as http:
            headers = {"content-type": "application/json"}
            for _ in range(3):
                response = await http.post("/v1/completions", content=content, headers=headers)
                assert response.status_code in (400, 413)
            engine.submit = None
            for _ in range(3):
                assert (await http.post("/v1/completions", json=BODY)).status_code == 500
        assert admission_of(app).num_requests == 0


class TestRetryAfter:
    """An estimate from the queue and the pace, within bounds."""

    @pytest.mark.parametrize(("expected", "told"), [(0.0, 1), (1.0, 1), (4.2, 5), (1e9, 60)])
    async def test_of_a_full_queue(self, client, engine, expected, told):
        engine.max_requests, engine.expected_wait = 0, expected
        response = await client.complete()
        assert_refused(response, 429, "queue_full", "rate_limit_error")
        assert response.headers["retry-after"] == str(told)

    async def test_of_a_wait_that_was_too_long(self, client, engine):
        engine.expected_wait = 7.5
        engine.script = lambda request: [
            Step("", (), FinishReason.ERROR, error="It waited.", error_code=QUEUE_TIMEOUT)
        ]
        assert (await client.complete()).headers["retry-after"] == "8"

    def test_of_the_limits_on_requests(self):
        now = [0.0]
        config = AdmissionConfig(max_requests=3, max_requests_per_key=1)
        admission = Admission(config, clock=lambda: now[0])

        def told(client: str) -> str:
            with pytest.raises(ApiError) as raised:
                admission.enter(client)
            assert raised.value.status in (429, 503)
            assert raised.value.headers is not None
            return raised.value.headers["Retry-After"]

        for _ in range(4):
            admission.enter("slow")
            now[0] += 20.0
            admission.leave("slow")
        admission.enter("slow")
        for _ in range(96):
            admission.enter("fast")
            now[0] += 0.25
            admission.leave("fast")
        admission.enter("fast")
        now[0] += 2.0
        assert told("fast") == "1", "one of its own ends in 0.3 s"
        assert told("slow") == "27", "of its own, 4 have ended in 106 s"
        admission.enter("third")
        assert told("fourth") == "1", "whoever ends makes room"
        now[0] += 1000.0
        assert told("fourth") == "32", "it has been silent for long"
        admission.draining = True
        assert told("fourth") == "20", "the drain timeout ends them all"


class TestWhatTheEngineIsTold:
    async def test_client_priority_and_queue_timeout(self, engine):
        app = make_app(engine, KEYS, queue_timeout=7.5, min_priority=-3)
        messages = [{"role": "user", "content": "a"}]
        async with make_client(app) as http:
            for path, body in (
                ("/v1/completions", {**BODY, "priority": -3}),
                ("/v1/chat/completions", {**BODY, "messages": messages, "priority": -3}),
                ("/v1/responses", {"model": "tiny/model", "input": "a", "priority": -3}),
            ):
                response = await http.post(path, json=body, headers=BEN)
                assert response.status_code == 200, response.text
                told = engine.submitted[-1]
                assert (told.client, told.priority, told.queue_timeout) == ("ben", -3, 7.5)

    @pytest.mark.parametrize("scope", ["client", "server"])
    async def test_scope_of_cached_prefixes(self, engine, scope):
        app = create_app(engine, Config(kv={"prefix_cache_scope": scope}), keys=KEYS)
        messages = [{"role": "user", "content": "a"}]
        scopes: list[str | None] = []
        async with make_client(app) as http:
            for headers in (ANN, BEN, {"x-api-key": "ann-second"}):
                for salt in ({}, {"cache_salt": "s"}):
                    bodies = (
                        ("/v1/completions", {**BODY, **salt}),
                        ("/v1/chat/completions", {**BODY, "messages": messages, **salt}),
                        ("/v1/responses", {"model": "tiny/model", "input": "a", **salt}),
                    )
                    for path, body in bodies:
                        response = await http.post(path, json=body, headers=headers)
                        assert response.status_code == 200, response.text
                    told = {request.cache_scope for request in engine.submitted[-3:]}
                    assert len(told) == 1
                    scopes += told
        ann, ann_salted, ben, ben_salted, *ann_second = scopes
        assert ann_second == [ann, ann_salted]
        assert ann != ann_salted
        assert (ann == ben) == (ann_salted == ben_salted) == (scope == "server")

    async def test_without_keys_and_settings(self, client, engine):
        await client.complete()
        told = engine.submitted[-1]
        assert (told.client, told.priority, told.queue_timeout) == ("", 0, None)

    @pytest.mark.parametrize("kind", ["complete", "chat"])
    @pytest.mark.parametrize(
        ("value", "message"),
        [(-1, "limit is 0"), (2**31, "less than"), ("high", "integer"), (1.5, "integer")],
    )
    async def test_priorities_that_are_refused(self, client, engine, kind, value, message):
        response = await getattr(client, kind)(priority=value)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "priority"
        assert message in error["message"]
        assert engine.submitted == []


class TestQueueTimeout:
    @pytest.fixture(autouse=True)
    def _busy(self, engine):
        engine.script = lambda request: [
            Step("", (), FinishReason.ERROR, error="It waited.", error_code=QUEUE_TIMEOUT)
        ]

    async def test_whole_answer(self, client):
        response = await client.complete()
        assert_refused(response, 503, "queue_timeout", "server_error")

    async def test_anthropics_shape(self, client):
        body = {"model": "tiny/model", "max_tokens": 5}
        body["messages"] = [{"role": "user", "content": "a"}]
        response = await client.http.post("/v1/messages", json=body)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "overloaded_error"

    @pytest.mark.parametrize("n", [1, 2])
    async def test_stream(self, client, n):
        response = await client.complete(stream=True, n=n)
        last = response.content.split(b"\n\n")[-2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "queue_timeout"


class TestRequestTimeout:
    @pytest.fixture
    def app(self, engine):
        engine.hold_after = 1
        return make_app(engine, request_timeout=0.15)

    @pytest.mark.parametrize("kind", ["complete", "chat"])
    @pytest.mark.parametrize("n", [1, 2])
    async def test_whole_answer(self, client, engine, app, kind, n):
        response = await getattr(client, kind)(n=n)
        assert response.status_code == 408
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
        assert response.headers["x-should-retry"] == "false"
        assert engine.num_requests == 0
        assert admission_of(app).num_requests == 0

    @pytest.mark.parametrize("kind", ["complete", "chat"])
    @pytest.mark.parametrize("n", [1, 2])
    async def test_stream_ends_in_an_error_event(self, client, engine, app, kind, n):
        response = await getattr(client, kind)(n=n, stream=True)
        assert response.status_code == 200
        *events, last, rest = response.content.split(b"\n\n")
        assert any(b"Hello" in event for event in events)
        assert rest == b""
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
        assert b"[DONE]" not in response.content
        assert engine.num_requests == 0
        assert admission_of(app).num_requests == 0

    async def test_anthropics_shape(self, client):
        body = {"model": "tiny/model", "max_tokens": 5}
        body["messages"] = [{"role": "user", "content": "a"}]
        response = await client.http.post("/v1/messages", json=body)
        assert response.status_code == 408
        assert response.json()["error"]["type"] == "timeout_error"
        response = await client.http.post("/v1/messages", json={**body, "stream": True})
        assert response.content.split(b"\n\n")[-2].startswith(b"event: error\n")

    async def test_the_time_runs_while_the_prompt_is_encoded(self, client, engine):
        engine.encode_gate = asyncio.Event()
        assert (await client.complete()).status_code == 408
        assert engine.submitted == []

    async def test_the_time_runs_while_the_body_is_sent(self, client, app):
        async def slowly():
            yield b'{"model": "tiny/model", '
            await asyncio.sleep(60)

        headers = {"content-type": "application/json"}
        response = await client.http.post("/v1/completions", content=slowly(), headers=headers)
        assert response.status_code == 408
        assert admission_of(app).num_requests == 0

    async def test_a_quick_request_does_not_notice(self, client, engine):
        engine.hold_after = None
        assert (await client.complete()).status_code == 200
        assert (await client.complete_stream())[-1]["choices"][0]["finish_reason"] == "stop"

    def test_openais_client_does_not_repeat_it(self, app, engine):
        with (
            live_server(app) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client,
            pytest.raises(openai.APIStatusError, match="longer than this server allows"),
        ):
            client.completions.create(**BODY)
        assert len(engine.submitted) == 1


class TestDraining:
    async def test_new_requests_are_sent_elsewhere(self, client, app):
        admission_of(app).draining = True
        assert_refused(await client.complete(), 503, "shutting_down", "server_error")
        assert_refused(await client.chat(stream=True), 503, "shutting_down", "server_error")
        response = await client.http.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "draining"})
        assert (await client.http.get("/metrics")).status_code == 200

    async def test_it_waits_until_the_last_request_is_over(self, client, app, engine):
        engine.pace = 0.02
        admission = admission_of(app)
        await admission.wait_until_idle()
        running = [asyncio.create_task(client.complete()) for _ in range(3)]
        await until(lambda: admission.num_requests == 3)
        idle = asyncio.create_task(admission.wait_until_idle())
        admission.draining = True
        assert {response.status_code for response in await asyncio.gather(*running)} == {200}
        await asyncio.wait_for(idle, 1)
        assert admission.num_requests == 0
