"""`python -m loadtest` against a server that speaks just enough of the API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from loadtest.__main__ import main
from tests.server.live_server import live_server


class FakeServer:
    """Gives three words, 20 ms apart; refuses every prompt that says so."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.get("/metrics", response_class=PlainTextResponse)(self.metrics)
        self.app.post("/v1/completions", response_model=None)(self.complete)

    def models(self) -> dict[str, Any]:
        return {"data": [{"id": "fake"}]}

    def metrics(self) -> str:
        passes, tokens = len(self.bodies), 3 * len(self.bodies)
        return (
            "# TYPE slipstream_target_passes_total counter\n"
            f"slipstream_target_passes_total {passes}\n"
            "# TYPE slipstream_generation_tokens_total counter\n"
            f"slipstream_generation_tokens_total {tokens}\n"
        )

    async def complete(self, request: Request) -> StreamingResponse | PlainTextResponse:
        body = await request.json()
        self.bodies.append(body)
        if body["prompt"] == "refuse me":
            return PlainTextResponse("", status_code=503)
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self) -> AsyncIterator[str]:
        for word in ("one", " two", " three"):
            await asyncio.sleep(0.02)
            yield f"data: {json.dumps({'choices': [{'text': word}]})}\n\n"
        end = {
            "choices": [{"text": "", "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 2, "completion_tokens": 3},
        }
        yield f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n"


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
def url(fake: FakeServer) -> Iterator[str]:
    with live_server(fake.app) as url:
        yield url


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.jsonl"
    path.write_text('{"prompt": "first"}\n{"prompt": "second"}\n')
    return path


def run(url: str, suite: Path, out: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    status = main([url, "--suite", str(suite), "--json", str(out), *flags])
    return status, json.loads(out.read_text())


def test_closed_loop(fake: FakeServer, url: str, suite: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ["--concurrency", "3", "--requests", "7", "--seed", "5", "--extra", '{"top_k": 1}']
    status, report = run(f"{url}/v1/", suite, tmp_path / "o.json", *flags, "--goodput", "ttft:5")
    assert status == 0
    assert (report["requests"], report["completed"], report["errors"]) == (7, 7, {})
    assert report["completion_tokens"] == 21
    assert report["goodput"]["good_requests"] == 7
    assert report["latencies"]["ttft"]["p50"] >= 0.02
    assert report["latencies"]["e2e"]["p50"] >= 0.06
    assert report["acceptance"]["tokens_per_pass"] == 3.0
    assert len(fake.bodies) == 8, "one more for the warm-up"
    measured = fake.bodies[1:]
    assert sorted(body["seed"] for body in measured) == list(range(5, 12))
    assert {(body["model"], body["top_k"], body["temperature"]) for body in measured} == {
        ("fake", 1, 0.0)
    }
    assert "3.00 tokens a target pass" in capsys.readouterr().out


def test_open_loop_within_a_time(url: str, suite: Path, tmp_path: Path) -> None:
    flags = ["--rate", "50", "--duration", "0.5", "--warmup", "0"]
    status, report = run(url, suite, tmp_path / "o.json", *flags)
    assert status == 0
    assert 10 <= report["requests"] <= 45
    assert report["completed"] == report["requests"]


def test_failed_requests_fail_the_run(url: str, suite: Path, tmp_path: Path) -> None:
    suite.write_text('{"prompt": "refuse me"}\n{"prompt": "fine"}\n')
    status, report = run(url, suite, tmp_path / "o.json")
    assert status == 1
    assert (report["completed"], report["errors"]) == (1, {"HTTP 503": 1})


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--suite", "nowhere.json"], "nowhere.json: No such file"),
        (["--rate", "0.001", "--duration", "0.01"], "no entry began within 0.01 s"),
    ],
)
def test_says_why_it_can_not_run(
    url: str, suite: Path, flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([url, "--suite", str(suite), *flags]) == 2
    assert problem in capsys.readouterr().err


def test_an_absent_server_is_one_line(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:9", "--suite", str(suite)]) == 2
    assert capsys.readouterr().err.startswith("loadtest: error: http://127.0.0.1:9")


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency", "2", "--rate", "1"],
        ["--concurrency", "0"],
        ["--goodput", "itl:1"],
        ["--extra", "{"],
    ],
)
def test_refuses_flags_that_make_no_sense(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["http://127.0.0.1:9", *flags])
    assert caught.value.code == 2
