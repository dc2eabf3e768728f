"""Policy: which drafter drafts for which request, and how far, length 0 included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.draft.acceptance import MAX_POSITIONS, AcceptanceTracker
from engine.draft.cost import CostModel

Floats = npt.NDArray[np.float64]

_LEAST_GAIN = 0.02
"""Expected extra tokens a step below which a draft is not worth the risk of a wrong estimate."""
_LOYALTY = 1.05
"""How much better another drafter must look before a request changes over."""
_ROUNDS = 4
_PASSES_BEFORE_TRUST = 3


@dataclass(frozen=True, slots=True)
class Option:
    """One drafter that may draft for a request.

    `grade` is that of a free drafter's draft, which is known before the choice; a model's is 0.
    """

    drafter: str
    max_tokens: int
    grade: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request about to decode and its options, in the configured order."""

    request_id: str
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request gets this step; `drafter` is None for plain decoding."""

    drafter: str | None = None
    length: int = 0
    least_certainty: float = 0.0


PLAIN = Choice()


class Policy(Protocol):
    """Chooses; learns from what came of it."""

    def choose(self, candidates: Sequence[Candidate], other_rows: int) -> list[Choice]:
        """A choice for each candidate.

        Args:
            other_rows: prompt rows the step is going to compute beside the candidates' own.
        """
        ...

    def wants_prepared(self, drafter: str) -> bool:
        """Whether a model drafter should follow prompts already while they are computed."""
        ...

    def observe_step(self, rows: int, seconds: float) -> None:
        """Learn what a step of the target cost."""
        ...

    def record(
        self, request_id: str, drafter: str, grade: int, num_drafted: int, num_accepted: int
    ) -> None:
        """Learn what the target made of a draft."""
        ...

    def forget(self, request_id: str) -> None: ...

    def state(self) -> dict[str, Any]:
        """For people and dashboards: estimates and current choices, JSON types only."""
        ...


class FixedPolicy:
    """The first drafter with anything to offer, always to the same length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def choose(self, candidates: Sequence[Candidate], other_rows: int) -> list[Choice]:
        return [
            Choice(c.options[0].drafter, min(self._length, c.options[0].max_tokens))
            if c.options
            else PLAIN
            for c in candidates
        ]

    def wants_prepared(self, drafter: str) -> bool:
        return True

    def observe_step(self, rows: int, seconds: float) -> None: ...

    def record(
        self, request_id: str, drafter: str, grade: int, num_drafted: int, num_accepted: int
    ) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"policy": "fixed", "draft_length": self._length}


class GoodputPolicy:
    """Maximises expected committed tokens per second over the whole batch.

    A draft of length k for a request is worth its expected accepted tokens, less the tokens that
    the batch could have committed in the time the draft costs: draft passes and extra rows of the
    target's pass. That rate is itself what the choices yield, so it is found by iteration
    (Dinkelbach, "On Nonlinear Fractional Programming", 1967). What is not tried is slowly
    forgotten, and thereby tried again.
    """

    def __init__(self, costs: Mapping[str, CostModel | None], *, first_length: int) -> None:
        """
        Args:
            costs: each drafter's cost of a pass; None for one that is free.
            first_length: draft length until enough passes have been timed.
        """
        self._target = CostModel()
        self._costs = dict(costs)
        self._first_length = first_length
        self._trackers: dict[tuple[str, int], AcceptanceTracker] = {}
        self._last: dict[str, Choice] = {}
        self._rate = 0.0

    def choose(self, candidates: Sequence[Candidate], other_rows: int) -> list[Choice]:
        self._fade()
        if self._target.num_observed < _PASSES_BEFORE_TRUST:
            choices = FixedPolicy(self._first_length).choose(candidates, other_rows)
        else:
            choices = self._best(candidates, len(candidates) + other_rows)
        for candidate, choice in zip(candidates, choices, strict=True):
            self._last[candidate.request_id] = choice
        return choices

    def wants_prepared(self, drafter: str) -> bool:
        if self._target.num_observed < _PASSES_BEFORE_TRUST:
            return True
        probe = Candidate("", (Option(drafter, MAX_POSITIONS),))
        return self._best([probe], 1)[0].drafter is not None

    def observe_step(self, rows: int, seconds: float) -> None:
        self._target.observe(rows, seconds)

    def record(
        self, request_id: str, drafter: str, grade: int, num_drafted: int, num_accepted: int
    ) -> None:
        self._tracker(drafter, grade).record(request_id, num_drafted, num_accepted)

    def forget(self, request_id: str) -> None:
        self._last.pop(request_id, None)
        for tracker in self._trackers.values():
            tracker.forget(request_id)

    def state(self) -> dict[str, Any]:
        acceptance: dict[str, dict[str, Any]] = {}
        for (drafter, grade), tracker in sorted(self._trackers.items()):
            acceptance.setdefault(drafter, {})[str(grade)] = {
                "drafts": tracker.num_drafts,
                "acceptance_by_position": tracker.by_position(),
            }
        return {
            "policy": "auto",
            "tokens_per_second": round(self._rate, 2),
            "target_step_ms": _milliseconds(self._target),
            "draft_pass_ms": {
                name: _milliseconds(cost) for name, cost in self._costs.items() if cost is not None
            },
            "acceptance": acceptance,
            "choices": {
                request_id: {"drafter": choice.drafter, "length": choice.length}
                for request_id, choice in list(self._last.items())
            },
        }

    def _best(self, candidates: Sequence[Candidate], base_rows: int) -> list[Choice]:
        choices = [self._last.get(c.request_id, PLAIN) for c in candidates]
        gains = [0.0] * len(candidates)
        rate = self._rate_of(choices, gains, base_rows)
        for _ in range(_ROUNDS):
            before = list(choices)
            for index, candidate in enumerate(candidates):
                num_others = sum(c.length for c in choices) - choices[index].length
                sharers = {
                    name: 1 + sum(c.drafter == name for i, c in enumerate(choices) if i != index)
                    for name in self._costs
                }
                choices[index], gains[index] = self._best_option(
                    candidate, base_rows + num_others, sharers, rate
                )
            rate = self._rate_of(choices, gains, base_rows)
            if choices == before:
                break
        self._rate = rate
        return choices

    def _best_option(
        self, candidate: Candidate, rows: int, sharers: Mapping[str, int], rate: float
    ) -> tuple[Choice, float]:
        """The choice worth most at a given rate of tokens per second, and its expected gain."""
        best, best_gain, best_value = PLAIN, 0.0, _LEAST_GAIN
        last = self._last.get(candidate.request_id, PLAIN).drafter
        for option in candidate.options:
            lengths = np.arange(1.0, min(option.max_tokens, MAX_POSITIONS) + 1)
            if not len(lengths):
                continue
            tracker = self._tracker(option.drafter, option.grade)
            gain = tracker.expected_accepted(candidate.request_id)[: len(lengths)]
            seconds = self._target.seconds(rows + lengths) - self._target.seconds(rows)
            seconds = seconds + self._draft_seconds(option.drafter, sharers, lengths)
            value = gain - rate * seconds
            at = int(value.argmax())
            worth = float(value[at]) * (_LOYALTY if option.drafter == last else 1.0)
            if worth > best_value:
                marginal = float(seconds[at] / lengths[at])
                best = Choice(option.drafter, at + 1, min(0.9, rate * marginal))
                best_gain, best_value = float(gain[at]), worth
        return best, best_gain

    def _draft_seconds(self, drafter: str, sharers: Mapping[str, int], lengths: Floats) -> Floats:
        """A request's share of the draft passes, which all requests of the drafter make together.

        The first pass also takes over the tokens of the last step, about two more rows.
        """
        cost = self._costs[drafter]
        if cost is None:
            return np.zeros_like(lengths)
        num_sharers = sharers[drafter]
        first, later = cost.seconds(3.0 * num_sharers), cost.seconds(float(num_sharers))
        return np.asarray((first + (lengths - 1) * later) / num_sharers)

    def _rate_of(self, choices: Sequence[Choice], gains: Sequence[float], base_rows: int) -> float:
        seconds = float(self._target.seconds(base_rows + sum(c.length for c in choices)))
        for name, cost in self._costs.items():
            lengths = [c.length for c in choices if c.drafter == name]
            if lengths and cost is not None:
                sharers = {name: len(lengths)}
                longest = np.asarray([float(max(lengths))])
                seconds += len(lengths) * float(self._draft_seconds(name, sharers, longest)[0])
        return (len(choices) + sum(gains)) / max(seconds, 1e-9)

    def _tracker(self, drafter: str, grade: int) -> AcceptanceTracker:
        tracker = self._trackers.get((drafter, grade))
        if tracker is None:
            tracker = self._trackers[drafter, grade] = AcceptanceTracker()
        return tracker

    def _fade(self) -> None:
        for tracker in self._trackers.values():
            tracker.fade()


def _milliseconds(cost: CostModel) -> dict[str, float]:
    return {str(rows): round(1e3 * seconds, 3) for rows, seconds in cost.curve().items()}
