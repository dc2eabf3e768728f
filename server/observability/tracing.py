"""OpenTelemetry traces: a span a request, and in it spans for queue, prefill and decode.

Spans are made when the request is over, from what its record holds; nothing is traced meanwhile.
Attributes follow OpenTelemetry's semantic conventions for HTTP servers and generative AI. The
OpenTelemetry packages are optional, so this module imports them only where traces are wanted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from engine.config import ConfigError, TracingConfig
from engine.request import FinishReason, RequestTiming, SamplingParams
from server.observability.request_record import RequestRecord
from server.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACES_PATH = "/v1/traces"


class Tracing:
    """Turns the records of finished requests into spans."""

    def __init__(self, processor: SpanProcessor) -> None:
        """
        Args:
            processor: gets the spans. Sampler and resource come from OpenTelemetry's own
                environment variables.
        """
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ours = Resource.create({"service.name": "slipstream", "service.version": VERSION})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("slipstream", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def export(self, record: RequestRecord, scope: Scope, started: float) -> None:
        """See `server.middleware.access_log.TraceSink`."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        unix_seconds = time.time() - time.monotonic()
        span = self._tracer.start_span(
            _name(record),
            context=self._propagator.extract(_trace_context(scope)),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(unix_seconds + started),
        )
        if span.is_recording():
            span.set_attributes(dict(_attributes(record)))
            if (error := _error(record)) is not None:
                span.set_attribute("error.type", error)
                span.set_status(Status(StatusCode.ERROR))
            context = set_span_in_context(span)
            for number, sequence in enumerate(record.sequences):
                if sequence.timing is None:
                    continue
                for name, start, end in _phases(sequence.timing):
                    child = self._tracer.start_span(
                        name,
                        context=context,
                        attributes={"slipstream.sequence": number},
                        start_time=_nanoseconds(unix_seconds + start),
                    )
                    child.end(_nanoseconds(unix_seconds + end))
        span.end(_nanoseconds(unix_seconds + started + record.seconds))

    def shutdown(self) -> None:
        """Send what is left; blocks, for some seconds where the collector is gone."""
        self._provider.shutdown()


def make_tracing(config: TracingConfig) -> Tracing | None:
    """Tracing to the configured collector; None where there is none.

    Raises:
        ConfigError: a collector is configured, but OpenTelemetry is not installed.
    """
    key = next((name for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
    if config.endpoint is not None:
        key = "tracing.endpoint"
    if key is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{key}: traces need the packages of the extra 'tracing' "
            "(pip install 'slipstream[tracing]')"
        ) from error
    endpoint = config.endpoint and config.endpoint.rstrip("/") + _TRACES_PATH
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


def _name(record: RequestRecord) -> str:
    if record.operation:
        return f"{record.operation} {record.model}"
    return f"{record.method} {record.route}"


def _trace_context(scope: Scope) -> dict[str, str]:
    headers = Headers(scope=scope)
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}


def _attributes(record: RequestRecord) -> Iterator[tuple[str, Any]]:
    yield "http.request.method", record.method
    yield "http.route", record.route
    yield "slipstream.request_id", record.request_id
    if record.status:
        yield "http.response.status_code", record.status
    if not record.operation or record.params is None:
        return
    yield "gen_ai.operation.name", record.operation
    yield "gen_ai.provider.name", "slipstream"
    yield "gen_ai.request.model", record.model
    yield "gen_ai.response.model", record.model
    yield "gen_ai.response.id", record.response_id
    for name, value in _settings(record.params).items():
        yield f"gen_ai.request.{name}", value
    if record.sequences:
        yield "gen_ai.response.finish_reasons", [str(s.finish_reason) for s in record.sequences]
    usage = record.usage
    yield "gen_ai.usage.input_tokens", usage.prompt_tokens
    yield "gen_ai.usage.output_tokens", usage.completion_tokens
    yield "gen_ai.usage.cache_read.input_tokens", usage.cached_tokens
    yield "slipstream.target_passes", usage.target_passes
    for draft in usage.drafts:
        yield f"slipstream.draft.{draft.drafter}.drafted_tokens", draft.drafted
        yield f"slipstream.draft.{draft.drafter}.accepted_tokens", draft.accepted


def _settings(params: SamplingParams) -> Mapping[str, Any]:
    return {
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
    }


def _error(record: RequestRecord) -> str | None:
    """What went wrong on the server's side; None: nothing."""
    if record.status >= 500:
        return str(record.status)
    failed = any(sequence.finish_reason is FinishReason.ERROR for sequence in record.sequences)
    return "generation_failed" if failed else None


def _phases(timing: RequestTiming) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of what happened to a sequence, as far as it came."""
    moments = (timing.arrived, timing.scheduled, timing.first_token)
    reached = [moment for moment in moments if moment is not None]
    yield from zip(
        ("queue", "prefill", "decode"), reached, [*reached[1:], timing.finished], strict=False
    )


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
