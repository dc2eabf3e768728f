"""Policy: which drafter drafts for which request, and how far, length 0 included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from engine.draft.acceptance import MAX_POSITIONS, AcceptanceByClass
from engine.draft.cost import CostModel
from engine.draft.decision import PLAIN, DraftDecision, DraftOption, DraftOutcome, RequestOptions
from engine.draft.step_cost import Floats, StepCosts

_LEAST_GAIN = 0.05
"""Expected extra tokens a step below which a draft is not worth the risk of a wrong estimate."""
_LEAST_SPEEDUP = 1.03
"""Over plain decoding; for less, a batch decodes plainly."""
_CONFIDENT_LENGTH = 10
"""How far a draft model that stays confident may go, whatever length is best on average."""
_OVERCONFIDENCE = 1.5
"""Draft models claim more confidence than the target bears out."""
_HYSTERESIS = 1.05
"""How much better another drafter must look before a request changes over."""
_ROUNDS = 4


class Policy(Protocol):
    """Decides; learns from what came of it."""

    def choose(self, requests: Sequence[RequestOptions], prompt_rows: int) -> list[DraftDecision]:
        """A decision for each request.

        Args:
            prompt_rows: those the step is going to compute beside the requests' own.
        """
        ...

    def wants_prepared(self, requests: Sequence[RequestOptions], num_running: int) -> list[bool]:
        """Whether a model drafter, each request's only option, should follow prompts already
        while they are computed."""
        ...

    def observe_step(self, rows: int, seconds: float) -> None:
        """Learn what a step of the target cost."""
        ...

    def plain_seconds(self, rows: int) -> float:
        """What a step of so many rows costs, by those observed; 0 before the first."""
        ...

    def record(self, outcome: DraftOutcome) -> None:
        """Learn what the target made of a draft."""
        ...

    def forget(self, request_id: str) -> None: ...

    def state(self) -> dict[str, Any]:
        """For people and dashboards: estimates and current decisions, JSON types only."""
        ...


class FixedPolicy:
    """The first drafter with anything to offer, always to the same length."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._target = CostModel()

    def choose(self, requests: Sequence[RequestOptions], prompt_rows: int) -> list[DraftDecision]:
        return [_to_length(r.options[0], self._length) if r.options else PLAIN for r in requests]

    def wants_prepared(self, requests: Sequence[RequestOptions], num_running: int) -> list[bool]:
        return [True] * len(requests)

    def observe_step(self, rows: int, seconds: float) -> None:
        self._target.observe(rows, seconds)

    def plain_seconds(self, rows: int) -> float:
        return float(self._target.seconds(rows))

    def record(self, outcome: DraftOutcome) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"policy": "fixed", "draft_length": self._length}


def _to_length(option: DraftOption, length: int) -> DraftDecision:
    length = min(length, option.max_tokens)
    return DraftDecision(option.drafter, length, expected_length=length)


def choose_draft_length(accepted: Floats, seconds: Floats, rate: float) -> tuple[int, float]:
    """The draft length worth most to the batch: argmax over k of accepted(k) - rate * seconds(k).

    A draft of length k is worth its expected accepted tokens, less the tokens that the batch could
    have committed in the time the draft costs. The length that maximises it maximises goodput,
    tokens committed per second (Liu et al., "Optimizing Speculative Decoding for Serving Large
    Language Models Using Goodput", arXiv 2406.14066), once the rate is the one that the choices
    themselves yield (Dinkelbach, "On Nonlinear Fractional Programming", 1967).

    Args:
        accepted: expected accepted tokens of drafts of length 1, 2, ...
        seconds: what these add to the step.
        rate: committed tokens per second.

    Returns:
        (length, worth in tokens).
    """
    worth = accepted - rate * seconds
    best = int(worth.argmax())
    return best + 1, float(worth[best])


class GoodputPolicy:
    """Maximises expected committed tokens per second over the whole batch.

    Each request's drafter and length are chosen at the rate of the batch, which is itself what the
    choices yield, so it is found by iteration (see `choose_draft_length`). What is not tried is
    slowly forgotten, and thereby tried again.
    """

    def __init__(self, costs: Mapping[str, CostModel | None], *, first_length: int) -> None:
        """
        Args:
            costs: each drafter's cost of a pass; None for one that is free.
            first_length: draft length until enough passes have been timed.
        """
        self._costs = StepCosts(costs)
        self._acceptance = AcceptanceByClass()
        self._first_length = first_length
        self._last: dict[str, DraftDecision] = {}
        self._rate = 0.0

    def choose(self, requests: Sequence[RequestOptions], prompt_rows: int) -> list[DraftDecision]:
        self._acceptance.fade()
        if self._costs.are_known:
            decisions = self._best(requests, prompt_rows)
        else:
            decisions = FixedPolicy(self._first_length).choose(requests, prompt_rows)
        for request, decision in zip(requests, decisions, strict=True):
            self._last[request.request_id] = decision
        return decisions

    def wants_prepared(self, requests: Sequence[RequestOptions], num_running: int) -> list[bool]:
        if not self._costs.are_known:
            return [True] * len(requests)
        return [
            any(self._speedup(r, option, num_running) >= _LEAST_SPEEDUP for option in r.options)
            for r in requests
        ]

    def observe_step(self, rows: int, seconds: float) -> None:
        self._costs.observe_target(rows, seconds)

    def plain_seconds(self, rows: int) -> float:
        return self._costs.target_seconds(rows)

    def record(self, outcome: DraftOutcome) -> None:
        self._acceptance.record(outcome)

    def forget(self, request_id: str) -> None:
        self._last.pop(request_id, None)
        self._acceptance.forget(request_id)

    def state(self) -> dict[str, Any]:
        return {
            "policy": "auto",
            "tokens_per_second": round(self._rate, 2),
            **self._costs.state(),
            "acceptance": self._acceptance.state(),
            "choices": {
                request_id: {"drafter": decision.drafter, "length": decision.expected_length}
                for request_id, decision in list(self._last.items())
            },
        }

    def _best(self, requests: Sequence[RequestOptions], prompt_rows: int) -> list[DraftDecision]:
        """The decisions of the highest rate that a few rounds find, one request after another."""
        base_rows = len(requests) + prompt_rows
        decisions = [self._last.get(r.request_id, PLAIN) for r in requests]
        gains = [0.0] * len(requests)
        rate = self._rate_of(decisions, gains)
        for _ in range(_ROUNDS):
            before = list(decisions)
            for index, request in enumerate(requests):
                others = decisions[:index] + decisions[index + 1 :]
                rows = base_rows + sum(d.expected_length for d in others)
                num_drafting = {
                    name: 1 + sum(d.drafter == name for d in others)
                    for name in self._costs.drafters
                }
                decisions[index], gains[index] = self._best_option(
                    request, rows, num_drafting, rate, len(requests)
                )
            rate = self._rate_of(decisions, gains)
            if decisions == before:
                break
        plain_rate = len(requests) / self._costs.target_seconds(len(requests))
        if rate < _LEAST_SPEEDUP * plain_rate:
            decisions, rate = [PLAIN] * len(requests), plain_rate
        self._rate = rate
        return decisions

    def _best_option(
        self,
        request: RequestOptions,
        rows: int,
        num_drafting: Mapping[str, int],
        rate: float,
        num_running: int,
    ) -> tuple[DraftDecision, float]:
        """The decision worth most at a given rate of tokens per second, and its expected gain."""
        best, best_gain, best_worth = PLAIN, 0.0, _LEAST_GAIN
        last = self._last.get(request.request_id, PLAIN).drafter
        for option in request.options:
            lengths, accepted = self._expected(request.request_id, option)
            if not len(lengths):
                continue
            seconds = self._costs.verification_seconds(rows, lengths)
            seconds = seconds + self._costs.drafting_seconds(
                option.drafter, num_drafting[option.drafter], lengths
            )
            seconds = seconds + self._prefill_seconds(request, option, num_running)
            length, worth = choose_draft_length(accepted, seconds, rate)
            worth *= _HYSTERESIS if option.drafter == last else 1.0
            if worth > best_worth:
                price = rate * float(seconds[length - 1] / lengths[length - 1])
                best = self._decision(option, length, price)
                best_gain, best_worth = float(accepted[length - 1]), worth
        return best, best_gain

    def _speedup(self, request: RequestOptions, option: DraftOption, num_running: int) -> float:
        """Over plain decoding, if as many requests as run all drafted as this one would."""
        lengths, accepted = self._expected(request.request_id, option)
        if not len(lengths):
            return 1.0
        plain = self._costs.target_seconds(num_running)
        seconds = self._costs.verification_seconds(num_running, num_running * lengths)
        seconds = seconds + num_running * (
            self._costs.drafting_seconds(option.drafter, num_running, lengths)
            + self._prefill_seconds(request, option, num_running)
        )
        return float(((1 + accepted) / (1 + seconds / plain)).max())

    def _prefill_seconds(
        self, request: RequestOptions, option: DraftOption, num_running: int
    ) -> float:
        return self._costs.prefill_seconds(
            option.drafter, option.num_uncomputed_tokens, request.num_left, num_running
        )

    def _expected(self, request_id: str, option: DraftOption) -> tuple[Floats, Floats]:
        """Lengths an option may draft to, and the accepted tokens expected of each."""
        lengths = np.arange(1.0, min(option.max_tokens, MAX_POSITIONS) + 1)
        tracker = self._acceptance.tracker(option.drafter, option.acceptance_class)
        return lengths, tracker.expected_accepted(request_id)[: len(lengths)]

    def _decision(self, option: DraftOption, length: int, price: float) -> DraftDecision:
        """A model may draft beyond the expected best length for as long as it is confident.

        Args:
            price: of one more draft token, in committed tokens.
        """
        if self._costs.is_free(option.drafter):
            return _to_length(option, length)
        longest = min(option.max_tokens, max(length, _CONFIDENT_LENGTH))
        return DraftDecision(option.drafter, longest, min(0.9, _OVERCONFIDENCE * price), length)

    def _rate_of(self, decisions: Sequence[DraftDecision], gains: Sequence[float]) -> float:
        """Tokens per second of decoding: prompt rows cost the same whatever is drafted."""
        lengths = {
            name: [d.expected_length for d in decisions if d.drafter == name]
            for name in self._costs.drafters
        }
        seconds = self._costs.step_seconds(len(decisions), lengths)
        return (len(decisions) + sum(gains)) / max(seconds, 1e-9)
