"""GET /metrics, read back with Prometheus' own parser."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import Config
from engine.figures import DrafterMetrics, EngineMetrics, Histogram
from engine.serving.async_engine import EngineState
from server.app import create_app
from server.version import VERSION
from tests.server.scripted_engine import ScriptedEngine

VLLM = {"model_name": "tiny/model", "engine": "0"}


@pytest.fixture
def config():
    return Config(metrics={"vllm_names": True})


@pytest.fixture
def engine():
    engine = ScriptedEngine()
    figures = engine.figures
    figures.running, figures.waiting, figures.kv_usage = 3, 4, 0.625
    figures.finished.update({"stop": 5, "abort": 2})
    figures.preemptions, figures.prefix_queries, figures.prefix_hits = 6, 700, 80
    figures.prompt_tokens, figures.generated_tokens, figures.target_passes = 900, 1000, 110
    figures.lossy_accepted_tokens = 13
    figures.step_failures, figures.restarts = 21, 22
    figures.decode_only_seconds, figures.plain_decode_seconds = 23.5, 47.0
    figures.ttft.observe(0.03)
    figures.ttft.observe(0.5, times=2)
    figures.ttft.observe(9999)
    figures.tpot.observe(0.1)
    figures.inter_token.observe(0.2, times=3)
    figures.e2e.observe(2.0)
    figures.queue.observe(0.1)
    figures.step.observe(0.02)
    figures.prefill.observe(0.4)
    figures.decode.observe(1.5)
    figures.prompt_length.observe(7)
    figures.output_length.observe(11)
    figures.step_tokens.observe(130)
    ngram, universal = DrafterMetrics(), DrafterMetrics()
    ngram.record(5, 3)
    ngram.record(4, 1)
    universal.record(5, 4)
    universal.failures, universal.seconds, universal.works = 9, 1.25, False
    figures.drafters.update(ngram=ngram, universal=universal)
    return engine


PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


async def scrape(client):
    response = await client.http.get("/metrics", headers={"accept": PROMETHEUS_ACCEPTS})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in samples, "a sample appears twice"
            samples[key] = sample.value
    return samples


def value(samples, name, **labels):
    return samples[(name, *sorted(labels.items()))]


@pytest.mark.parametrize(("prefix", "labels"), [("slipstream_", {}), ("vllm:", VLLM)])
async def test_serving_figures(client, prefix, labels):
    samples = await scrape(client)
    for name, expected in {
        "num_requests_running": 3,
        "num_requests_waiting": 4,
        "kv_cache_usage_perc": 0.625,
        "num_preemptions_total": 6,
        "prefix_cache_queries_total": 700,
        "prefix_cache_hits_total": 80,
        "prompt_tokens_total": 900,
        "generation_tokens_total": 1000,
        "time_to_first_token_seconds_count": 4,
        "request_time_per_output_token_seconds_sum": 0.1,
        "inter_token_latency_seconds_count": 3,
        "e2e_request_latency_seconds_sum": 2.0,
        "request_queue_time_seconds_count": 1,
        "request_prefill_time_seconds_sum": 0.4,
        "request_decode_time_seconds_sum": 1.5,
        "request_prompt_tokens_sum": 7,
        "request_generation_tokens_sum": 11,
        "iteration_tokens_total_sum": 130,
    }.items():
        assert value(samples, prefix + name, **labels) == pytest.approx(expected), name
    for reason, expected in {"stop": 5, "length": 0, "abort": 2, "error": 0}.items():
        name = prefix + "request_success_total"
        assert value(samples, name, finished_reason=reason, **labels) == expected


@pytest.mark.parametrize(("prefix", "labels"), [("slipstream_", {}), ("vllm:", VLLM)])
async def test_histogram_buckets_are_cumulative(client, prefix, labels):
    samples = await scrape(client)
    name = prefix + "time_to_first_token_seconds"
    for bound, expected in {
        "0.001": 0, "0.02": 0, "0.04": 1, "0.25": 1, "0.5": 3, "2560.0": 3, "+Inf": 4
    }.items():  # fmt: skip
        assert value(samples, f"{name}_bucket", le=bound, **labels) == expected
    assert value(samples, f"{name}_sum", **labels) == pytest.approx(0.03 + 1.0 + 9999)


async def test_figures_by_drafter(client):
    samples = await scrape(client)
    prefix = "slipstream_spec_decode_num_"
    for drafter, drafts, drafted, accepted in (("ngram", 2, 9, 4), ("universal", 1, 5, 4)):
        assert value(samples, f"{prefix}drafts_total", drafter=drafter) == drafts
        assert value(samples, f"{prefix}draft_tokens_total", drafter=drafter) == drafted
        assert value(samples, f"{prefix}accepted_tokens_total", drafter=drafter) == accepted
    for drafter, counts in (("ngram", [2, 1, 1]), ("universal", [1, 1, 1, 1])):
        for position, count in enumerate(counts):
            name = f"{prefix}accepted_tokens_per_pos_total"
            assert value(samples, name, drafter=drafter, position=str(position)) == count
    assert value(samples, "slipstream_drafter_failures_total", drafter="ngram") == 0
    assert value(samples, "slipstream_drafter_failures_total", drafter="universal") == 9
    assert value(samples, "slipstream_drafter_seconds_total", drafter="universal") == 1.25
    assert value(samples, "slipstream_drafter_works", drafter="ngram") == 1
    assert value(samples, "slipstream_drafter_works", drafter="universal") == 0


async def test_own_figures(client):
    samples = await scrape(client)
    assert value(samples, "slipstream_engine_ready") == 1
    assert value(samples, "slipstream_engine_state", state="ready") == 1
    assert value(samples, "slipstream_engine_state", state="dead") == 0
    assert value(samples, "slipstream_kv_cache_capacity_tokens") == 4096
    assert value(samples, "slipstream_max_context_tokens") == 128
    assert value(samples, "slipstream_step_failures_total") == 21
    assert value(samples, "slipstream_engine_restarts_total") == 22
    assert value(samples, "slipstream_decode_steps_seconds_total") == 23.5
    assert value(samples, "slipstream_plain_decode_estimate_seconds_total") == 47.0
    assert value(samples, "slipstream_http_requests_in_progress") == 1
    facts = {"version": VERSION, "model": "tiny/model", "architecture": "TinyForCausalLM"}
    build = {"weights": "int8", "device": "cpu", "kernels": "avx2", "drafters": "predicted,ngram"}
    assert value(samples, "slipstream_build_info", **facts, **build) == 1
    assert value(samples, "slipstream_target_passes_total") == 110
    assert value(samples, "slipstream_spec_decode_num_lossy_accepted_tokens_total") == 13
    assert value(samples, "slipstream_step_duration_seconds_count") == 1
    assert value(samples, "process_start_time_seconds") > 0


async def test_vllms_speculation_figures_add_up_the_drafters(client):
    samples = await scrape(client)
    prefix = "vllm:spec_decode_num_"
    assert value(samples, f"{prefix}drafts_total", **VLLM) == 3
    assert value(samples, f"{prefix}draft_tokens_total", **VLLM) == 14
    assert value(samples, f"{prefix}accepted_tokens_total", **VLLM) == 8
    for position, count in enumerate([3, 2, 2, 1]):
        name = f"{prefix}accepted_tokens_per_pos_total"
        assert value(samples, name, position=str(position), **VLLM) == count
    assert value(samples, "vllm:time_per_output_token_seconds_count", **VLLM) == 3


async def test_a_draft_of_nothing_accepted_and_no_drafters(client, engine):
    engine.figures.drafters.clear()
    samples = await scrape(client)
    assert value(samples, "vllm:spec_decode_num_drafts_total", **VLLM) == 0
    engine.figures.drafters["ngram"] = DrafterMetrics(drafts=1, draft_tokens=5)
    samples = await scrape(client)
    assert value(samples, "slipstream_spec_decode_num_draft_tokens_total", drafter="ngram") == 5


async def test_engine_that_is_not_ready(client, engine):
    engine.state = EngineState.LOADING
    samples = await scrape(client)
    assert value(samples, "slipstream_engine_ready") == 0
    assert value(samples, "slipstream_engine_state", state="loading") == 1
    assert not any("requests_running" in key[0] for key in samples)


async def exposition(client):
    return (await client.http.get("/metrics")).text


@pytest.mark.parametrize("owner", [EngineMetrics, DrafterMetrics])
async def test_every_figure_that_the_engine_counts_is_exposed(client, engine, owner):
    target = engine.figures if owner is EngineMetrics else engine.figures.drafters["ngram"]
    for place in fields(owner):
        current = getattr(target, place.name)
        before = await exposition(client)
        match current:
            case Histogram():
                current.observe(0.0123)
            case Counter():
                current["stop"] += 1
            case list():
                current.append(1)
            case dict():
                current["another"] = DrafterMetrics()
            case bool():
                setattr(target, place.name, not current)
            case _:
                setattr(target, place.name, current + 1)
        changed = set(before.splitlines()) ^ set((await exposition(client)).splitlines())
        assert any(line.startswith("slipstream_") and "http" not in line for line in changed), place


async def test_vllm_names_are_off_by_default(engine):
    transport = httpx.ASGITransport(app=create_app(engine, Config()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        text = (await http.get("/metrics")).text
    assert "slipstream_num_requests_running 3.0" in text
    assert "vllm" not in text
