"""Drafter: what proposes tokens for the target to check."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import SpeculationConfig
from engine.draft.cost import CostModel
from engine.draft.draft_model import DraftModel
from engine.request import GenerationRequest
from engine.sampling.grammar import Grammars
from engine.scheduling.sequence import TokenSequence
from engine.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence about to decode, and how many tokens are worth proposing for it."""

    sequence: TokenSequence
    max_tokens: int
    min_confidence: float = 0.0
    """A drafter that knows its own confidence may stop below this (see `DraftLimits`)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed target tokens.

    `acceptance_class` tells apart drafts of one drafter that are not equally likely to be
    accepted, such as long and short matches; acceptance is learnt for each class. 0: there is only
    one, else the higher, the likelier.
    """

    token_ids: tuple[int, ...] = ()
    acceptance_class: int = 0


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model, its cache empty, and the tokenizer of its own."""

    model: DraftModel
    tokenizer: TextTokenizer


@dataclass(frozen=True, slots=True)
class DrafterResources:
    """What an engine has that a drafter can be made of."""

    speculation: SpeculationConfig
    tokenizer: TextTokenizer
    """The target's."""
    grammars: Grammars
    draft: LoadedDraft | None = None
    """The model under the configuration key that the drafter needs (`DrafterEntry.model_key`)."""


class Drafter(ABC):
    """Proposes continuations. Whatever it proposes, the output stays the target's."""

    name: str
    """Unlike that of any other drafter; clients and metrics use it."""
    model: DraftModel | None = None
    """The draft model; None: drafts cost next to nothing."""

    @property
    def cost(self) -> CostModel | None:
        """What a pass of the draft model costs."""
        return None if self.model is None else self.model.cost

    @abstractmethod
    def warm_up(self) -> None:
        """Make a draft model's first passes, before any request."""

    @abstractmethod
    def preprocess(self, request: GenerationRequest, prediction_ids: Sequence[int]) -> Any:
        """What drafting for a request takes time in proportion to its size for; see `Preparation`.

        Called in any thread. The other methods find the result at the request's sequence, whose
        drafter they are only asked for when there is one.

        Args:
            prediction_ids: the request's prediction in the target's tokens; empty: it has none.
        """

    @abstractmethod
    def num_uncomputed_tokens(self, sequence: TokenSequence) -> int:
        """Tokens that a draft model has yet to compute before it can draft."""

    @abstractmethod
    def can_draft(self, sequence: TokenSequence) -> bool:
        """Whether asking for this sequence makes sense at all."""

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each request, of at most its `max_tokens`; empty: no proposal."""

    @abstractmethod
    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        """Use the time in which sequences still compute their prompt."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Free whatever is held for a request that has ended. Unknown ids are ignored."""


class FreeDrafter(Drafter):
    """A drafter without a model, for each request by itself. Most need only `propose_one`."""

    def warm_up(self) -> None:
        pass

    def preprocess(self, request: GenerationRequest, prediction_ids: Sequence[int]) -> Any:
        return None

    def num_uncomputed_tokens(self, sequence: TokenSequence) -> int:
        return 0

    def can_draft(self, sequence: TokenSequence) -> bool:
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self.propose_one(request) for request in requests]

    @abstractmethod
    def propose_one(self, request: DraftRequest) -> Draft:
        """A draft of at most `max_tokens`; see `propose`."""

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class DrafterWrapper(Drafter):
    """Another drafter, of which subclasses change something."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.name = inner.name
        self.model = inner.model

    def warm_up(self) -> None:
        self._inner.warm_up()

    def preprocess(self, request: GenerationRequest, prediction_ids: Sequence[int]) -> Any:
        return self._inner.preprocess(request, prediction_ids)

    def num_uncomputed_tokens(self, sequence: TokenSequence) -> int:
        return self._inner.num_uncomputed_tokens(sequence)

    def can_draft(self, sequence: TokenSequence) -> bool:
        return self._inner.can_draft(sequence)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return self._inner.propose(requests)

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        self._inner.prepare(sequences)

    def forget(self, request_id: str) -> None:
        self._inner.forget(request_id)
