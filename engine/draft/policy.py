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

_FIRST_GUESS = 0.75
_LEAST_GAIN = 0.05
"""Expected extra tokens a step below which a draft is not worth the risk of a wrong estimate."""
_LEAST_SPEEDUP = 1.03
"""Over plain decoding; for less, a batch decodes plainly."""
_CERTAIN_REACH = 10
"""How far a draft model that stays certain may go, whatever length is best on average."""
_OVERCONFIDENCE = 1.5
"""Draft models claim more certainty than the target bears out."""
_LOYALTY = 1.05
"""How much better another drafter must look before a request changes over."""
_USUAL_BACKLOG = 8
_FORESEEABLE_TOKENS = 128
_TOKENS_A_DRAFT = 3.0
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
    backlog: int = 0
    """Tokens the draft model has yet to take over before it can draft."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request about to decode and its options, in the configured order."""

    request_id: str
    options: tuple[Option, ...]
    num_left: int
    """Output tokens the request may still get."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request gets this step; `drafter` is None for plain decoding."""

    drafter: str | None = None
    length: int = 0
    """Draft tokens at most."""
    least_certainty: float = 0.0
    """See `DraftWish`."""
    expected_length: int = 0
    """What a drafter that stops when uncertain is reckoned to reach."""


PLAIN = Choice()


class Policy(Protocol):
    """Chooses; learns from what came of it."""

    def choose(self, candidates: Sequence[Candidate], other_rows: int) -> list[Choice]:
        """A choice for each candidate.

        Args:
            other_rows: prompt rows the step is going to compute beside the candidates' own.
        """
        ...

    def wants_prepared(self, candidates: Sequence[Candidate], num_running: int) -> list[bool]:
        """Whether a model drafter, each candidate's only option, should follow prompts already
        while they are computed."""
        ...

    def observe_step(self, rows: int, seconds: float) -> None:
        """Learn what a step of the target cost."""
        ...

    def plain_seconds(self, rows: int) -> float:
        """What a step of so many rows costs, by those observed; 0 before the first."""
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
        self._target = CostModel()

    def choose(self, candidates: Sequence[Candidate], other_rows: int) -> list[Choice]:
        return [_to_length(c.options[0], self._length) if c.options else PLAIN for c in candidates]

    def wants_prepared(self, candidates: Sequence[Candidate], num_running: int) -> list[bool]:
        return [True] * len(candidates)

    def observe_step(self, rows: int, seconds: float) -> None:
        self._target.observe(rows, seconds)

    def plain_seconds(self, rows: int) -> float:
        return float(self._target.seconds(rows))

    def record(
        self, request_id: str, drafter: str, grade: int, num_drafted: int, num_accepted: int
    ) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"policy": "fixed", "draft_length": self._length}


def _to_length(option: Option, length: int) -> Choice:
    length = min(length, option.max_tokens)
    return Choice(option.drafter, length, expected_length=length)


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
            choices = self._best(candidates, other_rows)
        for candidate, choice in zip(candidates, choices, strict=True):
            self._last[candidate.request_id] = choice
        return choices

    def wants_prepared(self, candidates: Sequence[Candidate], num_running: int) -> list[bool]:
        if self._target.num_observed < _PASSES_BEFORE_TRUST:
            return [True] * len(candidates)
        return [
            any(self._speedup(c, option, num_running) >= _LEAST_SPEEDUP for option in c.options)
            for c in candidates
        ]

    def observe_step(self, rows: int, seconds: float) -> None:
        self._target.observe(rows, seconds)

    def plain_seconds(self, rows: int) -> float:
        return float(self._target.seconds(rows))

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
                request_id: {"drafter": choice.drafter, "length": choice.expected_length}
                for request_id, choice in list(self._last.items())
            },
        }

    def _best(self, candidates: Sequence[Candidate], other_rows: int) -> list[Choice]:
        base_rows = len(candidates) + other_rows
        choices = [self._last.get(c.request_id, PLAIN) for c in candidates]
        gains = [0.0] * len(candidates)
        rate = self._rate_of(choices, gains)
        for _ in range(_ROUNDS):
            before = list(choices)
            for index, candidate in enumerate(candidates):
                num_others = (
                    sum(c.expected_length for c in choices) - choices[index].expected_length
                )
                sharers = {
                    name: 1 + sum(c.drafter == name for i, c in enumerate(choices) if i != index)
                    for name in self._costs
                }
                choices[index], gains[index] = self._best_option(
                    candidate, base_rows + num_others, sharers, rate, len(candidates)
                )
            rate = self._rate_of(choices, gains)
            if choices == before:
                break
        plain_rate = len(candidates) / float(self._target.seconds(len(candidates)))
        if rate < _LEAST_SPEEDUP * plain_rate:
            choices, rate = [PLAIN] * len(candidates), plain_rate
        self._rate = rate
        return choices

    def _best_option(
        self,
        candidate: Candidate,
        rows: int,
        sharers: Mapping[str, int],
        rate: float,
        num_running: int,
    ) -> tuple[Choice, float]:
        """The choice worth most at a given rate of tokens per second, and its expected gain."""
        best, best_gain, best_value = PLAIN, 0.0, _LEAST_GAIN
        last = self._last.get(candidate.request_id, PLAIN).drafter
        for option in candidate.options:
            lengths, gain = self._expected(candidate.request_id, option)
            if not len(lengths):
                continue
            seconds = self._target.seconds(rows + lengths) - self._target.seconds(rows)
            seconds = seconds + self._draft_seconds(option.drafter, sharers, lengths)
            seconds = seconds + self._backlog_seconds(option, candidate.num_left, num_running)
            value = gain - rate * seconds
            at = int(value.argmax())
            worth = float(value[at]) * (_LOYALTY if option.drafter == last else 1.0)
            if worth > best_value:
                best = self._choice(option, at + 1, rate * float(seconds[at] / lengths[at]))
                best_gain, best_value = float(gain[at]), worth
        return best, best_gain

    def _speedup(self, candidate: Candidate, option: Option, num_running: int) -> float:
        """Over plain decoding, if as many requests as run all drafted as this one would."""
        lengths, gain = self._expected(candidate.request_id, option)
        if not len(lengths):
            return 1.0
        plain = float(self._target.seconds(num_running))
        seconds = self._target.seconds(num_running * (1 + lengths)) - plain
        sharers = {option.drafter: num_running}
        seconds = seconds + num_running * (
            self._draft_seconds(option.drafter, sharers, lengths)
            + self._backlog_seconds(option, candidate.num_left, num_running)
        )
        return float(((1 + gain) / (1 + seconds / plain)).max())

    def _expected(self, request_id: str, option: Option) -> tuple[Floats, Floats]:
        """Lengths an option may draft to, and the accepted tokens expected of each."""
        lengths = np.arange(1.0, min(option.max_tokens, MAX_POSITIONS) + 1)
        tracker = self._tracker(option.drafter, option.grade)
        return lengths, tracker.expected_accepted(request_id)[: len(lengths)]

    def _choice(self, option: Option, length: int, price: float) -> Choice:
        """A model's draft may go on beyond the expected best length while the model is certain.

        Args:
            price: of one more draft token, in committed tokens.
        """
        if self._costs[option.drafter] is None:
            return _to_length(option, length)
        reach = min(option.max_tokens, max(length, _CERTAIN_REACH))
        return Choice(option.drafter, reach, min(0.9, _OVERCONFIDENCE * price), length)

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

    def _backlog_seconds(self, option: Option, num_left: int, num_running: int) -> float:
        """The price of catching up, spread over the drafts that the request may yet get.

        The more requests run, the sooner drafting may stop to pay, and the price be lost.
        """
        cost = self._costs[option.drafter]
        if cost is None or option.backlog <= _USUAL_BACKLOG:
            return 0.0
        num_drafts = max(1.0, min(num_left, _FORESEEABLE_TOKENS) / _TOKENS_A_DRAFT / num_running)
        return float(cost.seconds(option.backlog)) / num_drafts

    def _rate_of(self, choices: Sequence[Choice], gains: Sequence[float]) -> float:
        """Tokens per second of decoding: prompt rows cost the same whatever is drafted."""
        num_rows = len(choices) + sum(c.expected_length for c in choices)
        seconds = float(self._target.seconds(num_rows))
        for name, cost in self._costs.items():
            lengths = [c.expected_length for c in choices if c.drafter == name]
            if lengths and cost is not None:
                sharers = {name: len(lengths)}
                longest = np.asarray([float(max(lengths))])
                seconds += len(lengths) * float(self._draft_seconds(name, sharers, longest)[0])
        return (len(choices) + sum(gains)) / max(seconds, 1e-9)

    def _tracker(self, drafter: str, grade: int) -> AcceptanceTracker:
        tracker = self._trackers.get((drafter, grade))
        if tracker is None:
            tracker = AcceptanceTracker(grade / (grade + 2) if grade else _FIRST_GUESS)
            self._trackers[drafter, grade] = tracker
        return tracker

    def _fade(self) -> None:
        for tracker in self._trackers.values():
            tracker.fade()


def _milliseconds(cost: CostModel) -> dict[str, float]:
    return {str(rows): round(1e3 * seconds, 3) for rows, seconds in cost.curve().items()}
