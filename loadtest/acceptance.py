"""What speculation did during a run, from the server's /metrics before and after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "slipstream_"
_SPECULATION = f"{_PREFIX}spec_decode_num_"

Sample = tuple[str, frozenset[tuple[str, str]]]
Counters = Mapping[Sample, float]


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """One drafter during a run."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]
    """Drafts whose first, second, ... token was accepted."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens a draft."""
        return self.accepted_tokens / self.drafts if self.drafts else 0.0


@dataclass(frozen=True, slots=True)
class Acceptance:
    generated_tokens: int
    target_passes: int
    drafters: Mapping[str, DrafterFigures]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a request gets from one pass of the target; 1 without speculation."""
        return self.generated_tokens / self.target_passes if self.target_passes else 0.0


async def scrape(http: httpx.AsyncClient) -> Counters | None:
    """The server's counters; None if it has no Slipstream metrics."""
    try:
        response = await http.get("/metrics")
    except httpx.TransportError:
        return None
    if response.status_code != httpx.codes.OK:
        return None
    return parse(response.text)


def parse(exposition: str) -> Counters | None:
    """Slipstream's counters in a text exposition; None if there are none."""
    try:
        counters = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(exposition)
            if family.type == "counter"
            for sample in family.samples
            if sample.name.startswith(_PREFIX) and sample.name.endswith("_total")
        }
    except ValueError:
        return None
    return counters or None


def between(before: Counters, after: Counters) -> Acceptance:
    """What was counted between two scrapes."""
    delta = {sample: round(value - before.get(sample, 0.0)) for sample, value in after.items()}
    drafters = {
        dict(labels)["drafter"]
        for name, labels in delta
        if name.startswith(_SPECULATION) and "drafter" in dict(labels)
    }
    return Acceptance(
        generated_tokens=delta.get((f"{_PREFIX}generation_tokens_total", frozenset()), 0),
        target_passes=delta.get((f"{_PREFIX}target_passes_total", frozenset()), 0),
        drafters={name: _drafter(delta, name) for name in sorted(drafters)},
    )


def _drafter(delta: Mapping[Sample, int], drafter: str) -> DrafterFigures:
    def count(name: str) -> int:
        return delta.get((f"{_SPECULATION}{name}_total", frozenset({("drafter", drafter)})), 0)

    by_position = {
        int(dict(labels)["position"]): value
        for (name, labels), value in delta.items()
        if name == f"{_SPECULATION}accepted_tokens_per_pos_total"
        and dict(labels)["drafter"] == drafter
    }
    return DrafterFigures(
        drafts=count("drafts"),
        draft_tokens=count("draft_tokens"),
        accepted_tokens=count("accepted_tokens"),
        accepted_by_position=tuple(value for _, value in sorted(by_position.items())),
    )
