"""grammar: proposes the tokens that a request's grammar leaves no choice about."""

from __future__ import annotations

from engine.draft.drafter import NO_DRAFT, Draft, DrafterResources, DraftRequest, FreeDrafter
from engine.sampling.grammar import Grammars
from engine.scheduling.sequence import TokenSequence


class GrammarDrafter(FreeDrafter):
    """Drafts the text that must come next, such as a JSON object's keys and punctuation."""

    name = "grammar"

    def __init__(self, grammars: Grammars) -> None:
        """
        Args:
            grammars: those of the engine this drafter drafts for.
        """
        self._grammars = grammars

    @classmethod
    def create(cls, resources: DrafterResources) -> GrammarDrafter:
        return cls(resources.grammars)

    def can_draft(self, sequence: TokenSequence) -> bool:
        return sequence.request.grammar is not None

    def propose_one(self, request: DraftRequest) -> Draft:
        matcher = self._grammars.of(request.sequence.request_id)
        if matcher is None:
            return NO_DRAFT
        matcher.catch_up(request.sequence)
        return Draft(tuple(matcher.forced()[: request.max_tokens]))
