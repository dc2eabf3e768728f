"""OpenTelemetry traces, caught in memory."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine.config import Config, ConfigError, TracingConfig
from engine.request import DraftUsage, FinishReason
from server.app import create_app
from server.observability.tracing import ENDPOINT_VARIABLES, Tracing, make_tracing
from tests.server.conftest import Client, events_of
from tests.server.scripted_engine import Step, words

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
async def client(engine, config, exporter):
    app = create_app(engine, config, tracing=Tracing(SimpleSpanProcessor(exporter)))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield Client(http)


def spans_by_name(exporter):
    spans = exporter.get_finished_spans()
    names = [span.name for span in spans]
    assert len(set(names)) == len(names)
    return {span.name: span for span in spans}


async def test_request_has_spans_for_queue_prefill_and_decode(client, engine, exporter):
    engine.pace = 0.02
    engine.drafts = (DraftUsage("ngram", 9, 4),)
    before = time.time_ns()
    response = await client.complete(temperature=0.5, max_tokens=3, seed=7)
    after = time.time_ns()
    spans = spans_by_name(exporter)
    assert set(spans) == {"text_completion tiny/model", "queue", "prefill", "decode"}
    request = spans["text_completion tiny/model"]
    assert request.kind is SpanKind.SERVER
    assert request.parent is None
    assert request.status.status_code is StatusCode.UNSET
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "slipstream.request_id": response.headers["x-request-id"],
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "slipstream",
        "gen_ai.request.model": "tiny/model",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": "tiny/model",
        "gen_ai.response.id": response.json()["id"],
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": len("Say hello"),
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "slipstream.target_passes": 3,
        "slipstream.draft.ngram.drafted_tokens": 9,
        "slipstream.draft.ngram.accepted_tokens": 4,
    }
    assert expected.items() <= dict(request.attributes).items()
    values = [v for v in request.attributes.values() if isinstance(v, str)]
    assert not any("hello" in value.lower() for value in values)

    milliseconds = 1_000_000
    assert before - 5 * milliseconds < request.start_time < request.end_time
    assert request.end_time < after + 5 * milliseconds
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == request.context.span_id
        assert request.start_time <= spans[name].start_time <= spans[name].end_time
        assert spans[name].end_time <= request.end_time
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert spans["decode"].end_time - spans["decode"].start_time > 30 * milliseconds


async def test_client_s_trace_goes_on(client, exporter):
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=x"}
    body = {"model": "tiny/model", "messages": [{"role": "user", "content": "a"}], "stream": True}
    response = await client.http.post("/v1/chat/completions", json=body, headers=headers)
    assert events_of(response)
    spans = spans_by_name(exporter)
    request = spans["chat tiny/model"]
    assert f"{request.parent.span_id:016x}" == PARENT_ID
    assert request.context.trace_state.get("vendor") == "x"
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE_ID}


async def test_trace_that_the_client_does_not_sample_is_not_exported(client, exporter):
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
    body = {"model": "tiny/model", "prompt": "a"}
    response = await client.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    assert exporter.get_finished_spans() == ()


async def test_nonsense_in_traceparent_starts_a_new_trace(client, exporter):
    response = await client.http.get("/v1/models", headers={"traceparent": "00-zz-1"})
    assert response.status_code == 200
    assert spans_by_name(exporter)["GET /v1/models"].parent is None


async def test_every_sequence_has_its_phases(client, exporter):
    await client.complete(n=2, prompt=["a", "b"])
    spans = exporter.get_finished_spans()
    numbers = [s.attributes["slipstream.sequence"] for s in spans if s.name == "decode"]
    assert sorted(numbers) == [0, 1, 2, 3]
    [request] = [s for s in spans if s.kind is SpanKind.SERVER]
    assert request.attributes["gen_ai.usage.input_tokens"] == 2
    assert request.attributes["gen_ai.usage.output_tokens"] == 12


async def test_errors_are_marked(client, engine, exporter):
    await client.complete(max_tokens=-1)
    [refused] = exporter.get_finished_spans()
    assert refused.name == "POST /v1/completions"
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.status.status_code is StatusCode.UNSET
    exporter.clear()

    engine.script = lambda request: [
        *words("a", finish=None),
        Step("", (), FinishReason.ERROR, error="NaN"),
    ]
    assert (await client.complete()).status_code == 500
    failed = spans_by_name(exporter)["text_completion tiny/model"]
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == "500"
    exporter.clear()

    await client.http.post(
        "/v1/completions", json={"model": "tiny/model", "prompt": "a", "stream": True}
    )
    failed = spans_by_name(exporter)["text_completion tiny/model"]
    assert failed.attributes["http.response.status_code"] == 200
    assert failed.attributes["error.type"] == "generation_failed"


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_probes_are_not_traced(client, exporter, path):
    assert (await client.http.get(path)).status_code == 200
    assert exporter.get_finished_spans() == ()


@pytest.fixture
def no_environment(monkeypatch):
    for name in (*ENDPOINT_VARIABLES, "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


def exported_to(tracing):
    """The collector's URL (the exporter keeps it to itself)."""
    [processor] = tracing._provider._active_span_processor._span_processors
    tracing.shutdown()
    return processor._batch_processor._exporter._endpoint


@pytest.mark.usefixtures("no_environment")
def test_where_traces_go(monkeypatch):
    assert make_tracing(TracingConfig()) is None
    configured = TracingConfig(endpoint="http://collector:4318/")
    assert exported_to(make_tracing(configured)) == "http://collector:4318/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:4318")
    assert exported_to(make_tracing(TracingConfig())) == "http://other:4318/v1/traces"
    assert exported_to(make_tracing(configured)) == "http://collector:4318/v1/traces"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert make_tracing(configured) is None


@pytest.mark.usefixtures("no_environment")
def test_missing_packages_are_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"^tracing\.endpoint: .*slipstream\[tracing\]"):
        make_tracing(TracingConfig(endpoint="http://collector:4318"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:4318")
    with pytest.raises(ConfigError, match=r"^OTEL_EXPORTER_OTLP_ENDPOINT: "):
        make_tracing(TracingConfig())


@pytest.mark.usefixtures("no_environment")
def test_service_name_comes_from_the_environment(monkeypatch, exporter):
    def name():
        return Tracing(SimpleSpanProcessor(exporter))._provider.resource.attributes["service.name"]

    assert name() == "slipstream"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "answers")
    assert name() == "answers"


def test_nothing_of_opentelemetry_is_imported_when_traces_are_off():
    script = (
        "import sys, server.process.serve, server.observability.tracing; "
        "from engine.config import TracingConfig; "
        "assert server.observability.tracing.make_tracing(TracingConfig()) is None; "
        "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    environment = {"PATH": ""}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == 0


async def test_tracing_ends_with_the_app(engine, exporter):
    tracing = Tracing(SimpleSpanProcessor(exporter))
    app = create_app(engine, Config(), tracing=tracing)
    async with app.router.lifespan_context(app):
        pass
    assert exporter._stopped
