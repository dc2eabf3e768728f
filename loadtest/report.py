"""Sums up a run: latencies, throughput, goodput and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

import numpy as np

from loadtest.acceptance import Acceptance
from loadtest.client import Record

Latency = Literal["ttft", "tpot", "e2e"]
Limits = Mapping[Latency, float]
"""Seconds that an answer may take at most to be good."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of times in seconds; percentiles interpolate linearly between the two nearest values."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None of no values."""
        if not values:
            return None
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(float(np.mean(values)), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of complete answers."""

    ttft: Distribution | None
    """Time to the first text."""
    tpot: Distribution | None
    """Mean time of an output token after the first, by request."""
    gap: Distribution | None
    """Times between chunks of text; with speculation one chunk holds several tokens."""
    e2e: Distribution | None

    @classmethod
    def of(cls, records: Sequence[Record]) -> Self:
        return cls(
            ttft=Distribution.of([r.ttft for r in records if r.ttft is not None]),
            tpot=Distribution.of([r.tpot for r in records if r.tpot is not None]),
            gap=Distribution.of([gap for r in records for gap in r.gaps]),
            e2e=Distribution.of([r.e2e for r in records]),
        )


@dataclass(frozen=True, slots=True)
class Share:
    """The complete answers of one category."""

    requests: int
    completion_tokens: int
    latencies: Latencies

    @classmethod
    def of(cls, records: Sequence[Record]) -> Self:
        tokens = sum(record.completion_tokens for record in records)
        return cls(len(records), tokens, Latencies.of(records))


@dataclass(frozen=True, slots=True)
class Goodput:
    """Complete answers within every limit."""

    limits: Limits
    good_requests: int
    requests_per_second: float
    share: float
    """Of all requests, failed ones included."""


@dataclass(frozen=True, slots=True)
class Report:
    seconds: float
    """From the first request's start to the last answer's end."""
    requests: int
    completed: int
    errors: Mapping[str, int]
    """Failed requests by kind."""
    prompt_tokens: int
    completion_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    latencies: Latencies
    categories: Mapping[str, Share]
    goodput: Goodput | None
    acceptance: Acceptance | None


def summarize(
    records: Sequence[Record], limits: Limits, acceptance: Acceptance | None = None
) -> Report:
    """Sum up a run of at least one request; throughput and latencies count complete answers."""
    seconds = max(r.ended for r in records) - min(r.started for r in records)
    complete = [record for record in records if record.error is None]
    prompt_tokens = sum(record.prompt_tokens for record in complete)
    completion_tokens = sum(record.completion_tokens for record in complete)
    return Report(
        seconds=seconds,
        requests=len(records),
        completed=len(complete),
        errors=dict(Counter(r.error for r in records if r.error is not None)),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        requests_per_second=len(complete) / seconds,
        output_tokens_per_second=completion_tokens / seconds,
        total_tokens_per_second=(prompt_tokens + completion_tokens) / seconds,
        latencies=Latencies.of(complete),
        categories={
            category: Share.of([r for r in complete if r.category == category])
            for category in dict.fromkeys(record.category for record in complete)
        },
        goodput=_goodput(complete, len(records), seconds, limits) if limits else None,
        acceptance=acceptance,
    )


def _goodput(
    complete: Sequence[Record], num_requests: int, seconds: float, limits: Limits
) -> Goodput:
    good = sum(is_good(record, limits) for record in complete)
    return Goodput(limits, good, good / seconds, good / num_requests)


def is_good(record: Record, limits: Limits) -> bool:
    """Whether a complete answer met every limit; one it has no figure for can't be missed."""
    figures = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}
    return all(
        figure <= limit
        for latency, limit in limits.items()
        if (figure := figures[latency]) is not None
    )


def parse_limits(texts: Sequence[str]) -> Limits:
    """Read limits such as ``ttft:0.5``.

    Raises:
        ValueError: names what is wrong.
    """
    limits: dict[Latency, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        known = {latency: latency for latency in get_args(Latency)}
        if name not in known:
            raise ValueError(f"{text!r}: a limit is one of {', '.join(known)}, then ':SECONDS'")
        try:
            limits[known[name]] = float(value)
        except ValueError:
            raise ValueError(f"{text!r}: {value!r} is no number of seconds") from None
    return limits
