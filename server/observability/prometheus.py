"""Reads the engine's figures whenever Prometheus scrapes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from itertools import accumulate, zip_longest

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.figures import DrafterMetrics, EngineMetrics, Histogram
from engine.request import FinishReason
from engine.serving.async_engine import AsyncEngine, EngineState
from engine.summary import EngineSummary
from server.observability.http_counts import HttpCounts
from server.version import VERSION


def make_registry(
    engine: AsyncEngine, counts: HttpCounts, *, vllm_names: bool
) -> CollectorRegistry:
    """A registry with the figures of one engine and of this process.

    Args:
        counts: of the app's HTTP requests.
        vllm_names: also expose the figures that vLLM has under vLLM's names.
    """
    registry = CollectorRegistry()
    registry.register(HttpCollector(counts))
    registry.register(EngineCollector(engine, vllm_names=vllm_names))
    ProcessCollector(registry=registry)
    return registry


class HttpCollector(Collector):
    """Exposes the app's `HttpCounts`."""

    def __init__(self, counts: HttpCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        own = _Families("slipstream_", {})
        yield own.gauge(
            "http_requests_in_progress", "HTTP requests being answered.", self._counts.in_progress
        )
        yield own.gauge("event_loop_tasks", "Tasks of the server's event loop.", _num_tasks())
        yield own.counter(
            "http_requests",
            "HTTP requests answered (status 499: the client went away first).",
            {(*labels,): count for labels, count in self._counts.answered.items()},
            ("method", "route", "status"),
        )


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # asked from outside the event loop
        return 0


class EngineCollector(Collector):
    """Exposes `EngineMetrics`; while the engine is not ready, only that it is not."""

    def __init__(self, engine: AsyncEngine, *, vllm_names: bool) -> None:
        self._engine = engine
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        own = _Families("slipstream_", {})
        current = self._engine.state
        ready = current is EngineState.READY
        yield own.gauge("engine_ready", "Whether requests can be served (0 or 1).", ready)
        yield own.gauges(
            "engine_state",
            "1 for the state the engine is in, 0 for the others.",
            {(str(state),): state is current for state in EngineState},
            ("state",),
        )
        if not current.takes_requests:
            return
        yield from _loaded(own, self._engine.summary())
        metrics = self._engine.metrics()
        yield from _serving(own, metrics)
        yield from _speculation(own, "drafter", metrics.drafters)
        yield from _own_only(own, metrics)
        if self._vllm_names:
            labels = {"model_name": self._engine.card.name, "engine": "0"}
            vllm = _Families("vllm:", labels)
            yield from _serving(vllm, metrics)
            yield from _speculation(vllm, None, {"all": _total(metrics.drafters)})
            yield vllm.histogram(
                "time_per_output_token_seconds",
                "Older name of inter_token_latency_seconds.",
                metrics.inter_token,
            )


class _Families:
    """Makes metric families whose names share a prefix and whose samples share labels."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._names = list(labels)
        self._values = list(labels.values())

    def gauge(self, name: str, description: str, value: float) -> Metric:
        return self.gauges(name, description, {(): value})

    def gauges(
        self,
        name: str,
        description: str,
        values: Mapping[tuple[str, ...], float],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        """A gauge with one sample for each tuple of values of `labels`."""
        return self._filled(GaugeMetricFamily, name, description, values, labels)

    def counter(
        self,
        name: str,
        description: str,
        values: Mapping[tuple[str, ...], float],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        """A counter with one sample for each tuple of values of `labels`."""
        return self._filled(CounterMetricFamily, name, description, values, labels)

    def _filled(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        description: str,
        values: Mapping[tuple[str, ...], float],
        labels: tuple[str, ...],
    ) -> Metric:
        family = kind(self._prefix + name, description, labels=[*self._names, *labels])
        for label_values, value in values.items():
            family.add_metric([*self._values, *label_values], value)
        return family

    def histogram(self, name: str, description: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, description, labels=self._names)
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        # A copy: the engine's thread goes on counting meanwhile.
        cumulative = accumulate(list(histogram.counts))
        family.add_metric(
            self._values, list(zip(bounds, cumulative, strict=True)), sum_value=histogram.total
        )
        return family


def _serving(families: _Families, metrics: EngineMetrics) -> Iterator[Metric]:
    """The figures that vLLM has too, under its names."""
    yield families.gauge("num_requests_running", "Requests being decoded.", metrics.running)
    yield families.gauge("num_requests_waiting", "Requests in the queue.", metrics.waiting)
    yield families.gauge(
        "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", metrics.kv_usage
    )
    finished = metrics.finished.copy()
    yield families.counter(
        "request_success",
        "Finished requests.",
        {(str(reason),): finished[reason] for reason in FinishReason},
        ("finished_reason",),
    )
    for name, description, value in (
        ("num_preemptions", "Requests preempted for want of KV blocks.", metrics.preemptions),
        ("prefix_cache_queries", "Prompt tokens looked up in the cache.", metrics.prefix_queries),
        ("prefix_cache_hits", "Prompt tokens found in the cache.", metrics.prefix_hits),
        ("prompt_tokens", "Prompt tokens of requests that began to answer.", metrics.prompt_tokens),
        ("generation_tokens", "Tokens generated.", metrics.generated_tokens),
    ):
        yield families.counter(name, description, {(): value})
    for name, description, histogram in (
        ("time_to_first_token_seconds", "From arrival to the first token.", metrics.ttft),
        (
            "request_time_per_output_token_seconds",
            "Mean time per output token after the first, by request.",
            metrics.tpot,
        ),
        (
            "inter_token_latency_seconds",
            "Gap between a request's successive outputs.",
            metrics.inter_token,
        ),
        ("e2e_request_latency_seconds", "From arrival to the end.", metrics.e2e),
        ("request_queue_time_seconds", "From arrival to the first step.", metrics.queue),
        (
            "request_prefill_time_seconds",
            "From first step to first token.",
            metrics.prefill,
        ),
        ("request_decode_time_seconds", "From the first token to the last.", metrics.decode),
        ("request_prompt_tokens", "Prompt tokens of a request.", metrics.prompt_length),
        ("request_generation_tokens", "Output tokens of a request.", metrics.output_length),
        (
            "iteration_tokens_total",
            "Tokens a step computes: prompt, decoding and draft tokens.",
            metrics.step_tokens,
        ),
    ):
        yield families.histogram(name, description, histogram)


def _speculation(
    families: _Families, label: str | None, drafters: Mapping[str, DrafterMetrics]
) -> Iterator[Metric]:
    """Figures by drafter, under vLLM's names; `label` None: of the only entry, without a label."""
    labels = () if label is None else (label,)
    named: dict[tuple[str, ...], DrafterMetrics] = {
        (name,) if labels else (): figures for name, figures in dict(drafters).items()
    }
    for name, description, values in (
        ("num_drafts", "Drafts verified.", {k: d.drafts for k, d in named.items()}),
        ("num_draft_tokens", "Tokens drafted.", {k: d.draft_tokens for k, d in named.items()}),
        (
            "num_accepted_tokens",
            "Draft tokens accepted.",
            {k: d.accepted_tokens for k, d in named.items()},
        ),
    ):
        yield families.counter(f"spec_decode_{name}", description, values, labels)
    yield families.counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by position in the draft (the first is 0).",
        {
            (*key, str(position)): count
            for key, figures in named.items()
            for position, count in enumerate(list(figures.accepted_by_position))
        },
        (*labels, "position"),
    )


def _loaded(families: _Families, summary: EngineSummary) -> Iterator[Metric]:
    target = summary.target
    facts = {
        "version": VERSION,
        "model": summary.name,
        "architecture": target.architecture,
        "weights": target.weight_format,
        "device": target.device,
        "kernels": target.kernels,
        "drafters": ",".join(summary.drafters),
    }
    yield families.gauges(
        "build_info", "Always 1; what serves.", {tuple(facts.values()): 1}, tuple(facts)
    )
    yield families.gauge(
        "kv_cache_capacity_tokens", "Tokens that fit the KV cache.", target.kv_tokens
    )
    yield families.gauge(
        "max_context_tokens", "Prompt and output tokens a request may have.", summary.max_context
    )


def _own_only(families: _Families, metrics: EngineMetrics) -> Iterator[Metric]:
    for name, description, value in (
        (
            "target_passes",
            "Decoding chunks the target computed; generation_tokens over it: tokens a pass.",
            metrics.target_passes,
        ),
        (
            "spec_decode_num_lossy_accepted_tokens",
            "Draft tokens kept against the target's choice, by requests with lossy acceptance.",
            metrics.lossy_accepted_tokens,
        ),
        (
            "step_failures",
            "Forward passes that raised and were tried again in parts.",
            metrics.step_failures,
        ),
        ("engine_restarts", "Times the engine was made anew after a failure.", metrics.restarts),
        (
            "decode_steps_seconds",
            "Time of the engine steps that computed no prompt, drafting included.",
            metrics.decode_only_seconds,
        ),
        (
            "plain_decode_estimate_seconds",
            "Time that plain decoding would have taken for the tokens of the same steps, by the "
            "measured cost of passes; divided by decode_steps_seconds: the speed-up.",
            metrics.plain_decode_seconds,
        ),
    ):
        yield families.counter(name, description, {(): value})
    yield families.histogram("step_duration_seconds", "Time of an engine step.", metrics.step)
    drafters = dict(metrics.drafters)
    yield families.counter(
        "drafter_failures",
        "Times a drafter raised and its requests went on without a draft.",
        {(name,): figures.failures for name, figures in drafters.items()},
        ("drafter",),
    )
    yield families.gauges(
        "drafter_works",
        "0 while a drafter is put aside after failures in a row, else 1.",
        {(name,): figures.works for name, figures in drafters.items()},
        ("drafter",),
    )
    yield families.counter(
        "drafter_seconds",
        "Time spent drafting.",
        {(name,): figures.seconds for name, figures in drafters.items()},
        ("drafter",),
    )


def _total(drafters: Mapping[str, DrafterMetrics]) -> DrafterMetrics:
    figures = list(dict(drafters).values())
    by_position = zip_longest(*(list(f.accepted_by_position) for f in figures), fillvalue=0)
    return DrafterMetrics(
        drafts=sum(f.drafts for f in figures),
        draft_tokens=sum(f.draft_tokens for f in figures),
        accepted_tokens=sum(f.accepted_tokens for f in figures),
        accepted_by_position=[sum(counts) for counts in by_position],
        failures=sum(f.failures for f in figures),
    )
