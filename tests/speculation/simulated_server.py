"""A server made of nothing but costs and chances, to see what the policy makes of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from engine.draft.cost import CostModel
from engine.draft.decision import DraftOption, DraftOutcome, RequestOptions
from engine.draft.policy import GoodputPolicy

PassCost = Callable[[int], float]
"""Seconds of a forward pass by its number of rows."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a number of steps came to, beside what plain decoding would have."""

    tokens: int
    seconds: float
    plain_seconds: float
    """That plain decoding takes for as many tokens."""
    mean_length: float

    @property
    def speed_up(self) -> float:
        return self.plain_seconds / self.seconds


def memory_bound(seconds: float, seconds_a_row: float) -> PassCost:
    """A pass that streams the weights, and computes its rows meanwhile."""
    return lambda rows: max(seconds, seconds_a_row * rows) + 0.05 * seconds_a_row * rows


class SimulatedServer:
    """Requests that all draft with one model, and always have tokens to go."""

    def __init__(self, target: PassCost, draft: PassCost, *, num_running: int = 1) -> None:
        self._target = target
        self._draft = draft
        self._cost = CostModel()
        self._rng = random.Random(0)
        self.policy = GoodputPolicy({"model": self._cost}, first_length=5)
        self.requests = [f"r{index}" for index in range(num_running)]
        for rows in (1, 2, 4, 8, 1, 2, 4, 8):
            self.policy.observe_step(rows, target(rows))
            self._cost.observe(rows, draft(rows))

    def run(self, steps: int, acceptance: float) -> Figures:
        """Take steps while each draft token is right with a certain chance."""
        tokens, seconds, drafted = 0, 0.0, 0
        for _ in range(steps):
            step_tokens, step_seconds, step_drafted = self._step(acceptance)
            tokens += step_tokens
            seconds += step_seconds
            drafted += step_drafted
        count = len(self.requests)
        plain = tokens / count * self._target(count)
        return Figures(tokens, seconds, plain, drafted / steps / count)

    def _step(self, acceptance: float) -> tuple[int, float, int]:
        requests = [
            RequestOptions(name, (DraftOption("model", 24),), 1000) for name in self.requests
        ]
        decisions = self.policy.choose(requests, 0)
        lengths = [decision.expected_length for decision in decisions]
        seconds, depth = 0.0, 0
        while drafting := sum(length > depth for length in lengths):
            rows = drafting * (3 if depth == 0 else 1)
            self._cost.observe(rows, self._draft(rows))
            seconds += self._draft(rows)
            depth += 1
        rows = len(lengths) + sum(lengths)
        self.policy.observe_step(rows, self._target(rows))
        tokens = 0
        for name, length in zip(self.requests, lengths, strict=True):
            accepted = 0
            while accepted < length and self._rng.random() < acceptance:
                accepted += 1
            tokens += accepted + 1
            if length:
                self.policy.record(DraftOutcome(name, "model", 0, length, accepted))
        return tokens, seconds + self._target(rows), sum(lengths)
