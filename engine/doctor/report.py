"""What the doctor found about a pair of models."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.doctor.acceptance import DRAFT_LENGTH, Acceptance
from engine.doctor.divergence import Divergence


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of a forward pass by its number of rows; medians."""

    target_ms: dict[int, float]
    draft_ms: dict[int, float]

    @property
    def ratio(self) -> float:
        """A draft pass relative to a target pass, both of one row."""
        return self.draft_ms[1] / self.target_ms[1]

    def step_ms(self, length: int) -> float:
        """A step with drafts of a fixed length: so many draft passes, the first of which takes
        over the last step's tokens, and one target pass."""
        drafting = self.draft_ms[3] + (length - 1) * self.draft_ms[1] if length else 0.0
        return drafting + self.target_ms[length + 1]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the doctor found."""

    target: str
    draft: str
    drafter: str
    vocabulary_overlap: float
    """Share of the draft's tokens that the target has too."""
    divergence: Divergence | None
    acceptance: tuple[Acceptance, ...]
    """One entry a temperature, drafts drawn with the target's noise."""
    argmax_acceptance: tuple[Acceptance, ...]
    """The same with the draft's likeliest tokens, if asked for."""
    raw_text_acceptance: Acceptance | None
    """At temperature 0, of the chat prompts' text without any template."""
    chat_acceptance: Acceptance | None
    """At temperature 0, of the same prompts as chats."""
    costs: Costs

    def speed_up(self, acceptance: Acceptance, length: int) -> float:
        """Expected speed relative to plain decoding, one request at a time."""
        plain = self.costs.target_ms[1]
        return acceptance.tokens_a_pass(length) * plain / self.costs.step_ms(length)

    def best_length(self, acceptance: Acceptance) -> int:
        """The fixed draft length with the highest expected speed; 0: plain decoding."""
        return max(range(DRAFT_LENGTH + 1), key=lambda length: self.speed_up(acceptance, length))

    def as_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "target": self.target,
            "draft": self.draft,
            "drafter": self.drafter,
            "vocabulary_overlap": self.vocabulary_overlap,
            "kl_divergence": self.divergence and asdict(self.divergence),
            "acceptance": [self._acceptance_json(entry) for entry in self.acceptance],
            "argmax_acceptance": [_rates(entry) for entry in self.argmax_acceptance],
            "raw_text_acceptance": self.raw_text_acceptance and _rates(self.raw_text_acceptance),
            "chat_acceptance": self.chat_acceptance and _rates(self.chat_acceptance),
            "cost_ratio": self.costs.ratio,
            "target_ms_by_rows": self.costs.target_ms,
            "draft_ms_by_rows": self.costs.draft_ms,
        }

    def _acceptance_json(self, entry: Acceptance) -> dict[str, Any]:
        best = self.best_length(entry)
        return _rates(entry) | {
            "best_length": best,
            "tokens_a_pass": entry.tokens_a_pass(best),
            "expected_speed_up": self.speed_up(entry, best),
            "speed_up_by_length": {
                length: self.speed_up(entry, length) for length in range(DRAFT_LENGTH + 1)
            },
        }


def _rates(entry: Acceptance) -> dict[str, Any]:
    return {
        "temperature": entry.temperature,
        "rate": entry.rate,
        "by_position": entry.by_position,
        "drafts": len(entry.drafts),
    }
