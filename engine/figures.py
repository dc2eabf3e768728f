"""Plain counters and histograms of one engine; exporters read them, nothing here exports."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TPOT_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_LENGTH_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
)  # fmt: skip
_STEP_TOKENS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_STEP_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class Histogram:
    """Counts of observations at or under each upper bound, their sum and number."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class DrafterMetrics:
    """Figures of one drafter."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    """How many drafts had their first, second, ... token accepted."""
    failures: int = 0
    """Times the drafter raised, or its drafts made the target's pass raise; the requests went on
    without a draft."""
    works: bool = True
    """False while the drafter is put aside, after several failures in a row."""
    seconds: float = 0.0
    """Time spent in the drafter, whatever came of it."""

    def record(self, num_drafted: int, num_accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += num_drafted
        self.accepted_tokens += num_accepted
        missing = num_accepted - len(self.accepted_by_position)
        self.accepted_by_position.extend([0] * missing)
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1


@dataclass(slots=True)
class EngineMetrics:
    """Everything one engine counts. Written by the engine's thread only; times in seconds."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks held by requests, 0 to 1."""
    finished: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason."""
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    target_passes: int = 0
    """Decoding chunks the target computed; generated_tokens / target_passes is tokens a pass."""
    step_failures: int = 0
    """Forward passes that raised; their requests were tried again in parts."""
    restarts: int = 0
    """Times the engine was made anew from the loaded weights."""
    lossy_accepted_tokens: int = 0
    """Draft tokens kept against the target's choice, for requests with lossy acceptance."""
    ttft: Histogram = field(default_factory=lambda: Histogram(_TTFT_BUCKETS))
    tpot: Histogram = field(default_factory=lambda: Histogram(_TPOT_BUCKETS))
    """One observation a finished request: its mean time per output token after the first."""
    inter_token: Histogram = field(default_factory=lambda: Histogram(_TPOT_BUCKETS))
    """One observation a step and request: the gap since its previous tokens."""
    e2e: Histogram = field(default_factory=lambda: Histogram(_LATENCY_BUCKETS))
    queue: Histogram = field(default_factory=lambda: Histogram(_LATENCY_BUCKETS))
    prefill: Histogram = field(default_factory=lambda: Histogram(_LATENCY_BUCKETS))
    """From leaving the queue to the first token, of finished requests."""
    decode: Histogram = field(default_factory=lambda: Histogram(_LATENCY_BUCKETS))
    """From the first token to the last, of finished requests."""
    prompt_length: Histogram = field(default_factory=lambda: Histogram(_LENGTH_BUCKETS))
    output_length: Histogram = field(default_factory=lambda: Histogram(_LENGTH_BUCKETS))
    step: Histogram = field(default_factory=lambda: Histogram(_STEP_BUCKETS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_STEP_TOKENS_BUCKETS))
    """Rows of a step: prompt, decoding and draft tokens."""
    decode_only_seconds: float = 0.0
    """Time of the steps that computed no prompt, drafting included."""
    plain_decode_seconds: float = 0.0
    """What plain decoding would have needed for the tokens of the same steps, by the measured cost
    of passes; plain_decode_seconds / decode_only_seconds is the speed-up of speculation."""
    drafters: dict[str, DrafterMetrics] = field(default_factory=dict)
