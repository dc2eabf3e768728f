"""Drafter: what proposes tokens for the target to check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence about to decode, and how many tokens are worth proposing for it."""

    sequence: TokenSequence
    max_tokens: int


class Drafter(Protocol):
    """Proposes continuations. Whatever it proposes, the output stays the target's."""

    @property
    def name(self) -> str: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """Target token ids for each request, at most its `max_tokens`; empty: no proposal."""
        ...

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        """Use the time in which sequences still compute their prompt; may do nothing."""
        ...

    def forget(self, request_id: str) -> None:
        """Free whatever is held for a request that has ended. Unknown ids are ignored."""
        ...
