"""grammar: proposes the tokens that a request's grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence

from engine.draft.drafter import NO_DRAFT, Draft, DraftRequest
from engine.request import GenerationRequest
from engine.sampling.grammar import Grammars
from engine.scheduling.sequence import TokenSequence


class ForcedDrafter:
    """Drafts the text that must come next, such as a JSON object's keys and punctuation."""

    name = "grammar"
    cost = None

    def __init__(self, grammars: Grammars) -> None:
        """
        Args:
            grammars: those of the engine this drafter drafts for.
        """
        self._grammars = grammars

    def warm_up(self) -> None: ...

    def preprocess(self, request: GenerationRequest, prediction_ids: Sequence[int]) -> None: ...

    def backlog(self, sequence: TokenSequence) -> int:
        return 0

    def can_draft(self, sequence: TokenSequence) -> bool:
        return sequence.request.grammar is not None

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def prepare(self, sequences: Sequence[TokenSequence]) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def _propose(self, request: DraftRequest) -> Draft:
        matcher = self._grammars.of(request.sequence.request_id)
        if matcher is None:
            return NO_DRAFT
        matcher.catch_up(request.sequence)
        return Draft(tuple(matcher.forced()[: request.max_tokens]))
