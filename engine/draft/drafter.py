"""Drafter: what proposes tokens for the target to check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.draft.cost import CostModel
from engine.request import GenerationRequest
from engine.scheduling.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence about to decode, and how many tokens are worth proposing for it."""

    sequence: TokenSequence
    max_tokens: int
    least_certainty: float = 0.0
    """A drafter that knows its own certainty may stop below this (see `DraftWish`)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed target tokens.

    `grade` tells apart drafts of one drafter that deserve different trust, such as long and short
    matches; acceptance is learnt for each grade.
    """

    token_ids: tuple[int, ...] = ()
    grade: int = 0


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Proposes continuations. Whatever it proposes, the output stays the target's."""

    @property
    def name(self) -> str: ...

    @property
    def cost(self) -> CostModel | None:
        """What a pass of the draft model costs; None: drafts cost next to nothing."""
        ...

    def warm_up(self) -> None:
        """Make a draft model's first passes, before any request; else do nothing."""
        ...

    def preprocess(self, request: GenerationRequest, prediction_ids: Sequence[int]) -> Any:
        """What drafting for a request takes time in proportion to its size for; see `Preparation`.

        Called in any thread. The other methods find the result at the request's sequence, whose
        drafter they are only asked for when there is one.

        Args:
            prediction_ids: the request's prediction in the target's tokens; empty: it has none.
        """
        ...

    def backlog(self, sequence: TokenSequence) -> int:
        """Tokens a draft model has yet to take over before it can draft; else 0."""
        ...

    def can_draft(self, sequence: TokenSequence) -> bool:
        """Whether asking for this sequence makes sense at all."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each request, of at most its `max_tokens`; empty: no proposal."""
        ...

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        """Use the time in which sequences still compute their prompt; may do nothing."""
        ...

    def forget(self, request_id: str) -> None:
        """Free whatever is held for a request that has ended. Unknown ids are ignored."""
        ...
