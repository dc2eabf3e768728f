"""Reads the engine's figures whenever Prometheus scrapes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, zip_longest

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.async_engine import AsyncEngine, EngineState
from engine.metrics import DrafterMetrics, EngineMetrics, Histogram
from engine.request import FinishReason


def make_registry(engine: AsyncEngine, *, vllm_names: bool) -> CollectorRegistry:
    """A registry with the figures of one engine and of this process.

    Args:
        vllm_names: also expose the figures that vLLM has under vLLM's names.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, vllm_names=vllm_names))
    ProcessCollector(registry=registry)
    return registry


class EngineCollector(Collector):
    """Exposes `EngineMetrics`; while the engine is not ready, only that it is not."""

    def __init__(self, engine: AsyncEngine, *, vllm_names: bool) -> None:
        self._engine = engine
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        own = _Families("slipstream_", {})
        ready = self._engine.state is EngineState.READY
        yield own.gauge("engine_ready", "Whether requests can be served (0 or 1).", ready)
        if not ready:
            return
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
        family = GaugeMetricFamily(self._prefix + name, description, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def counter(
        self,
        name: str,
        description: str,
        values: Mapping[tuple[str, ...], float],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        """A counter with one sample for each tuple of values of `labels`."""
        family = CounterMetricFamily(
            self._prefix + name, description, labels=[*self._names, *labels]
        )
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
        ("num_accepted_tokens", "Accepted.", {k: d.accepted_tokens for k, d in named.items()}),
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


def _own_only(families: _Families, metrics: EngineMetrics) -> Iterator[Metric]:
    yield families.counter(
        "target_passes", "Decoding slices the target computed.", {(): metrics.target_passes}
    )
    yield families.counter(
        "spec_decode_num_lossy_accepted_tokens",
        "Draft tokens kept against the target's choice, by requests with lossy acceptance.",
        {(): metrics.lossy_accepted_tokens},
    )
    yield families.histogram("step_duration_seconds", "Time of an engine step.", metrics.step)
    yield families.counter(
        "drafter_failures",
        "Times a drafter raised and its requests went on without a draft.",
        {(name,): figures.failures for name, figures in dict(metrics.drafters).items()},
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
