"""What a policy decides on, what it decides, and what it is told of the outcome."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftOption:
    """One drafter that may draft for a request."""

    drafter: str
    max_tokens: int
    acceptance_class: int = 0
    """Of a free drafter's draft, which is known before the decision; a model's is 0."""
    num_uncomputed_tokens: int = 0
    """Tokens the draft model has yet to compute before it can draft."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A request about to decode and its options, in the configured order."""

    request_id: str
    options: tuple[DraftOption, ...]
    num_left: int
    """Output tokens the request may still get."""


@dataclass(frozen=True, slots=True)
class DraftDecision:
    """What a request gets this step; `drafter` is None for plain decoding."""

    drafter: str | None = None
    length: int = 0
    """Draft tokens at most."""
    min_confidence: float = 0.0
    """See `DraftLimits`."""
    expected_length: int = 0
    """What a drafter that stops when unconfident is reckoned to reach."""


PLAIN = DraftDecision()


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What the target made of a draft."""

    request_id: str
    drafter: str
    acceptance_class: int
    num_drafted: int
    num_accepted: int
