from __future__ import annotations

import httpx
from prometheus_client import generate_latest

from engine.figures import DrafterMetrics
from loadtest.acceptance import Acceptance, DrafterFigures, between, parse, scrape
from server.observability.http_counts import HttpCounts
from server.observability.prometheus import make_registry
from tests.server.scripted_engine import ScriptedEngine


def exposition(engine: ScriptedEngine) -> str:
    return generate_latest(make_registry(engine, HttpCounts(), vllm_names=True)).decode()


async def test_counts_what_the_server_exposes() -> None:
    engine = ScriptedEngine()
    await engine.start()
    metrics = engine.metrics()
    metrics.generated_tokens, metrics.target_passes = 100, 60
    metrics.drafters["ngram"] = ngram = DrafterMetrics()
    ngram.record(4, 3)
    before = parse(exposition(engine))
    metrics.generated_tokens, metrics.target_passes = 130, 70
    metrics.drafters["universal"] = universal = DrafterMetrics()
    ngram.record(4, 2)
    universal.record(5, 5)
    universal.record(5, 0)
    after = parse(exposition(engine))
    assert before is not None
    assert after is not None
    found = between(before, after)
    assert found == Acceptance(
        generated_tokens=30,
        target_passes=10,
        drafters={
            "ngram": DrafterFigures(1, 4, 2, (1, 1, 0)),
            "universal": DrafterFigures(2, 10, 5, (1, 1, 1, 1, 1)),
        },
    )
    assert found.tokens_per_pass == 3.0
    assert found.drafters["universal"].acceptance_rate == 0.5
    assert found.drafters["universal"].mean_accepted == 2.5


def test_nothing_drafted_is_no_division_by_zero() -> None:
    nothing = DrafterFigures(0, 0, 0, ())
    assert (nothing.acceptance_rate, nothing.mean_accepted) == (0.0, 0.0)
    assert Acceptance(0, 0, {}).tokens_per_pass == 0.0


async def test_other_servers_have_no_figures() -> None:
    answers = {
        "/a/metrics": httpx.Response(404),
        "/b/metrics": httpx.Response(200, text="<html>no metrics"),
        "/c/metrics": httpx.Response(200, text="# TYPE other counter\nother_total 1\n"),
    }
    transport = httpx.MockTransport(lambda request: answers[request.url.path])
    for name in "abc":
        async with httpx.AsyncClient(transport=transport, base_url=f"http://t/{name}/") as http:
            assert await scrape(http) is None
