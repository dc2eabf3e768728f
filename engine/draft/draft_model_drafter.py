"""What all drafters with a draft model have in common: they follow the target, then draft."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from engine.draft.draft_model import DraftLimits, DraftModel, DraftSequence
from engine.draft.drafter import Draft, Drafter, DrafterResources, DraftRequest
from engine.sampling.coupling import CoupledSampler
from engine.scheduling.sequence import TokenSequence
from engine.text.tokenizer import TextTokenizer


@dataclass(slots=True)
class DraftState:
    """How far the draft model has followed one request."""

    draft: DraftSequence
    """Its tokens for what is committed, and behind them those it drafted last."""
    num_followed: int
    """Target tokens, prompt included, that the draft model's tokens stand for."""
    is_lost: bool
    """The target's tokens can't be followed any more; the request gets no drafts."""


StateT = TypeVar("StateT", bound=DraftState)


class DraftModelDrafter(Drafter, Generic[StateT]):
    """Drafts token by token with a smaller model, for all requests together.

    Sampled requests are drafted with the noise the target will sample with (see
    `engine.sampling.coupling`), so the two agree whenever their distributions nearly do.
    """

    model: DraftModel

    def __init__(
        self, model: DraftModel, tokenizer: TextTokenizer, target_tokenizer: TextTokenizer
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._target_tokenizer = target_tokenizer
        self._states: dict[str, StateT] = {}

    @classmethod
    def create(cls, resources: DrafterResources) -> Self:
        """
        Raises:
            ConfigError: this draft model does not do for this target.
        """
        if resources.draft is None:
            raise ValueError(f"{cls.name} needs a draft model")
        return cls(resources.draft.model, resources.draft.tokenizer, resources.tokenizer)

    def warm_up(self) -> None:
        self.model.warm_up()

    def num_uncomputed_tokens(self, sequence: TokenSequence) -> int:
        state = self._states.get(sequence.request_id)
        if state is None:
            return sequence.num_tokens
        return state.draft.num_uncomputed_tokens + sequence.num_tokens - state.num_followed

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        states = [self._followed(request.sequence) for request in requests]
        self.model.prefill(
            [s.draft for s in states if not s.is_lost and self.model.needs_prefill(s.draft)]
        )
        drafted = self.model.draft(
            [state.draft for state in states],
            [self._limits(state, r) for state, r in zip(states, requests, strict=True)],
            self._sampler([request.sequence for request in requests]),
            self._stop_ids,
        )
        return [
            Draft(self._translate(state, request, draft_ids))
            for state, request, draft_ids in zip(states, requests, drafted, strict=True)
        ]

    def forget(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            self.model.free(state.draft)

    def _state(self, sequence: TokenSequence) -> StateT:
        state = self._states.get(sequence.request_id)
        if state is None:
            state = self._states[sequence.request_id] = self._start(sequence)
        return state

    def _is_full(self, state: StateT, num_more: int) -> bool:
        return not self.model.has_room(len(state.draft.token_ids) + num_more)

    def _limits(self, state: StateT, request: DraftRequest) -> DraftLimits:
        is_hopeless = state.is_lost or self._is_full(state, request.max_tokens)
        return DraftLimits(0 if is_hopeless else request.max_tokens, request.min_confidence)

    @property
    @abstractmethod
    def _stop_ids(self) -> frozenset[int]:
        """Draft tokens that end a draft."""

    @abstractmethod
    def _sampler(self, sequences: Sequence[TokenSequence]) -> CoupledSampler: ...

    @abstractmethod
    def _start(self, sequence: TokenSequence) -> StateT:
        """Take up a request's prompt."""

    @abstractmethod
    def _followed(self, sequence: TokenSequence) -> StateT:
        """The request's state once the draft model's tokens stand for all committed ones."""

    @abstractmethod
    def _translate(
        self, state: StateT, request: DraftRequest, draft_ids: Sequence[int]
    ) -> tuple[int, ...]:
        """Target tokens for what the draft model wrote, `max_tokens` at most."""
