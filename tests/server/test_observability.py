"""Log lines, HTTP counts and the start-up summary."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import logging
import shlex
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import Config
from engine.request import SamplingDefaults
from server.app import create_app
from server.observability.logs import (
    ConsoleFormatter,
    JsonFormatter,
    RequestIdFilter,
    configure_logging,
)
from server.observability.start_summary import first_request, log_ready
from server.process.serve import serves
from tests.server.live_server import live_server
from tests.server.scripted_engine import ScriptedEngine

SECRET_PROMPT = "my mother's maiden name"


@pytest.fixture(params=["console", "json"])
def log_format(request):
    return request.param


@pytest.fixture
def log(monkeypatch, log_format):
    """Gives what has been logged, as lines."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        root.handlers.clear()
        configure_logging("debug", log_format)
    yield lambda: stream.getvalue().splitlines()
    root.handlers[:], level = before
    root.setLevel(level)
    for name in ("uvicorn", "httpx", "httpcore", "opentelemetry"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def requests_in(lines):
    return [line for line in lines if "server.middleware.access_log" in line]


async def test_one_line_a_request_with_its_id_and_without_content(client, log, log_format):
    headers = {"X-Request-Id": "call-7", "Authorization": "Bearer very-secret"}
    body = {"model": "tiny/model", "prompt": SECRET_PROMPT, "max_tokens": 2}
    response = await client.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    lines = log()
    [line] = requests_in(lines)
    if log_format == "json":
        record = json.loads(line)
        assert record.pop("time").endswith("+00:00")
        assert record.pop("duration_s") >= record.pop("ttft_s") >= record.pop("queue_s") == 0
        assert record.pop("message").startswith("POST /v1/completions 200 in ")
        assert record == {
            "level": "info",
            "logger": "server.middleware.access_log",
            "request_id": "call-7",
            "event": "request",
            "method": "POST",
            "route": "/v1/completions",
            "status": 200,
            "model": "tiny/model",
            "response_id": response.json()["id"],
            "finish_reasons": ["length"],
            "prompt_tokens": len(SECRET_PROMPT),
            "cached_tokens": 1,
            "output_tokens": 2,
            "target_passes": 2,
        }
    else:
        assert "[call-7]: POST /v1/completions 200 in " in line
        assert line.endswith(f"with {len(SECRET_PROMPT)} + 2 tokens")
    everything = "\n".join(lines)
    for secret in (SECRET_PROMPT, "Hello", "very-secret"):
        assert secret not in everything


async def test_line_of_a_stream_comes_when_it_is_over(client, log, log_format):
    await client.chat_stream(n=2)
    [line] = requests_in(log())
    assert "POST /v1/chat/completions 200" in line
    if log_format == "json":
        record = json.loads(line)
        assert record["finish_reasons"] == ["stop", "stop"]
        assert record["output_tokens"] == 6
        assert record["prompt_tokens"] == len("<user>Say hello")


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_probes_are_quiet(client, log, path):
    assert (await client.http.get(path)).status_code == 200
    [line] = requests_in(log())
    assert "debug" in line.lower()


async def test_lines_about_a_request_carry_its_id_in_any_task_and_thread(client, log, engine):
    async def fail(*_, **__):
        await asyncio.to_thread(logging.getLogger("engine.part").warning, "from a thread")
        raise RuntimeError("broken")

    engine.encode = fail
    response = await client.http.post(
        "/v1/completions",
        json={"model": "tiny/model", "prompt": "a"},
        headers={"X-Request-Id": "call-8"},
    )
    assert response.status_code == 500
    lines = log()
    for message in ("from a thread", "unexpected error", "POST /v1/completions 500 in"):
        [line] = [line for line in lines if message in line]
        assert "call-8" in line


async def test_a_client_can_not_write_into_the_log(client, log):
    await client.http.get("/v1/no%0Asuch", headers={"X-Request-Id": "a b] ERROR"})
    [line] = requests_in(log())
    assert "GET other 404" in line
    assert "ab" in line
    assert "ERROR" not in line.split("server.middleware.access_log")[0]


def test_live_server_logs_no_address(app, log, capsys):
    import httpx

    with live_server(app) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 200
    # The line is written behind the answer: it is there for sure once the server has ended.
    lines = log()
    mine = [line for line in lines if "httpx" not in line and "httpcore" not in line]
    assert requests_in(mine)
    assert not any("127.0.0.1" in line and "GET" in line for line in mine)


def test_exceptions_stay_on_one_line_of_json():
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.makeLogRecord(
            {"msg": "it %s", "args": ("broke",), "exc_info": sys.exc_info(), "name": "engine"}
        )
    RequestIdFilter().filter(record)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    values = json.loads(text)
    assert values["message"] == "it broke"
    assert values["exception"].endswith("ValueError: a\nb")
    assert "request_id" not in values
    assert "engine: it broke\nTraceback" in ConsoleFormatter().format(record)


async def http_samples(client):
    text = (await client.http.get("/metrics")).text
    return {
        (s.labels["method"], s.labels["route"], s.labels["status"]): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == "slipstream_http_requests_total"
    }


async def test_requests_are_counted_by_route_not_by_path(client):
    await client.complete()
    await client.complete(max_tokens=-1)
    await client.http.post("/v1/completions", content=b"{")
    await client.http.get("/v1/models/tiny/model")
    await client.http.get("/v1/models/another")
    await client.http.get("/wp-login.php")
    await client.http.put("/v1/completions")
    await client.http.request("BREW", "/v1/coffee")
    await client.http.get("/v1/responses/resp_1")
    assert await http_samples(client) == {
        ("POST", "/v1/completions", "200"): 1,
        ("POST", "/v1/completions", "400"): 1,
        ("POST", "/v1/completions", "415"): 1,
        ("GET", "/v1/models/{model}", "200"): 1,
        ("GET", "/v1/models/{model}", "404"): 1,
        ("GET", "other", "404"): 1,
        ("other", "/v1/completions", "405"): 1,
        ("other", "other", "404"): 1,
        ("GET", "/v1/responses/{response_id}", "404"): 1,
    }


def ready_log(log, engine, config, *, has_page=False):
    log_ready(engine.summary(), config, "http://127.0.0.1:8000", needs_key=False, has_page=has_page)
    return log()


def test_start_up_summary(log, log_format):
    engine = ScriptedEngine(sampling_defaults=SamplingDefaults(temperature=0.7, top_k=20))
    engine.max_context = 1024
    config = Config(scheduler={"max_running": 6, "max_waiting": 9}, limits={"max_choices": 7})
    lines = ready_log(log, engine, config)
    if log_format == "json":
        [line] = lines
        record = json.loads(line)
        assert record["event"] == "ready"
        assert record["message"] == "tiny/model is ready on http://127.0.0.1:8000"
        assert record["target"]["weight_bytes"] == 3 << 29
        assert record["requests_that_fit"] == {"1024": 4, "512": 6}
        assert record["limits"]["max_waiting"] == 9
        assert record["limits"]["max_choices"] == 7
        assert record["sampling_defaults"] == {"temperature": 0.7, "top_k": 20}
        assert record["drafters"] == ["predicted", "ngram"]
        return
    head, *table, _, command, body = lines
    assert head.endswith(
        "server.observability.start_summary: tiny/model is ready on http://127.0.0.1:8000"
    )
    rows = dict(line.strip().split("  ", 1) for line in table)
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["model"] == "TinyForCausalLM, 135M parameters, int8, 1.50 GiB"
    assert rows["device"] == "cpu, avx2 kernels, 2 threads"
    assert rows["KV cache"] == ("4096 tokens in 96 MiB; requests that fit: 4 of 1024, 6 of 512")
    assert rows["context"].startswith("1024 tokens")
    assert rows["drafters"] == "predicted, ngram; policy auto"
    assert rows["limits"].startswith("max_running=6, max_waiting=9, ")
    assert "drain_timeout=20.0" in rows["limits"]
    assert "max_choices=7" in rows["limits"]
    assert rows["sampling"] == "temperature=0.7, top_k=20 (the model's advice)"
    words = shlex.split(f"{command[:-1]} {body}")
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "tiny/model"


def test_a_page_is_one_of_the_apps_routes():
    app = create_app(ScriptedEngine(), Config())
    assert serves(app, "/health")
    assert not serves(app, "/nothing")


@pytest.mark.parametrize("has_page", [False, True])
def test_the_page_is_named_where_there_is_one(log, log_format, has_page):
    lines = ready_log(log, ScriptedEngine(), Config(), has_page=has_page)
    shown = has_page and log_format == "console"
    assert (lines[-1] == "  or open http://127.0.0.1:8000/ in a browser") is shown


def test_the_first_request_brings_a_key_where_one_is_needed():
    summary = dataclasses.replace(ScriptedEngine().summary(), has_chat_template=False)
    words = shlex.split(first_request(summary, "https://127.0.0.1:8000", needs_key=True))
    assert "https://127.0.0.1:8000/v1/completions" in words
    assert "Authorization: Bearer YOUR_KEY" in words
