"""model: a draft model that shares the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from engine.config import ConfigError
from engine.draft.draft_model import DraftModel, DraftPrompt
from engine.draft.draft_model_drafter import DraftModelDrafter, DraftState
from engine.draft.drafter import DrafterResources, DraftRequest
from engine.request import GenerationRequest
from engine.sampling.coupling import CoupledSampler
from engine.scheduling.sequence import TokenSequence
from engine.text.tokenizer import TextTokenizer


class VocabularyMismatchError(ValueError):
    """The draft model's tokens are not the target's; the message says where they part."""


def check_same_vocabulary(draft: TextTokenizer, target: TextTokenizer) -> None:
    """Raise `VocabularyMismatchError` unless every id means the same bytes to both.

    One may be longer by padding (ids without a token), as in models of one family; equal sizes
    prove nothing.
    """
    shared = min(len(draft.token_bytes), len(target.token_bytes))
    for token_id in range(shared):
        ours, theirs = draft.token_bytes[token_id], target.token_bytes[token_id]
        if ours != theirs:
            raise VocabularyMismatchError(
                f"token {token_id} is {ours!r} in the draft and {theirs!r} in the target"
            )
    longer = max(draft.token_bytes, target.token_bytes, key=len)
    if any(longer[shared:]):
        raise VocabularyMismatchError(
            f"one vocabulary has {len(longer)} tokens, the other {shared}"
        )


class SameVocabularyDrafter(DraftModelDrafter[DraftState]):
    """Drafts with a model whose tokens are the target's, so that nothing is translated.

    A request is lost once an id is seen that only the target has.
    """

    name = "model"

    def __init__(
        self, model: DraftModel, tokenizer: TextTokenizer, target_tokenizer: TextTokenizer
    ) -> None:
        """
        Raises:
            VocabularyMismatchError: ids don't mean the same to both models.
        """
        check_same_vocabulary(tokenizer, target_tokenizer)
        super().__init__(model, tokenizer, target_tokenizer)
        self._num_ids = len(target_tokenizer.token_bytes)

    @classmethod
    def create(cls, resources: DrafterResources) -> Self:
        try:
            return super().create(resources)
        except VocabularyMismatchError as error:
            raise ConfigError(
                f"model_draft: {error}; a model of another vocabulary belongs under draft"
            ) from error

    def preprocess(self, request: GenerationRequest, prediction_ids: Sequence[int]) -> DraftPrompt:
        return self.model.prepare_prompt(request.prompt_token_ids, request.cache_scope)

    def can_draft(self, sequence: TokenSequence) -> bool:
        state = self._states.get(sequence.request_id)
        is_lost = state is not None and state.is_lost
        return not is_lost and self.model.has_room(sequence.num_tokens + 1)

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        states = [self._followed(s) for s in sequences if self.can_draft(s)]
        self.model.prefill([state.draft for state in states if not state.is_lost])

    @property
    def _stop_ids(self) -> frozenset[int]:
        return self._target_tokenizer.eos_ids

    def _sampler(self, sequences: Sequence[TokenSequence]) -> CoupledSampler:
        return CoupledSampler(sequences)

    def _start(self, sequence: TokenSequence) -> DraftState:
        prompt: DraftPrompt = sequence.preparation.drafts[self.name]
        draft = self.model.start(prompt)
        return DraftState(draft, sequence.num_prompt, is_lost=not prompt.is_known)

    def _followed(self, sequence: TokenSequence) -> DraftState:
        state = self._state(sequence)
        new = sequence.token_ids[state.num_followed :]
        state.is_lost = state.is_lost or any(i >= self.model.vocab_size for i in new)
        state.draft.rewrite(state.num_followed, new)
        state.num_followed = sequence.num_tokens
        return state

    def _translate(
        self, state: DraftState, request: DraftRequest, draft_ids: Sequence[int]
    ) -> tuple[int, ...]:
        """Up to a padding id, which the target has no token for."""
        for index, token_id in enumerate(draft_ids):
            if token_id >= self._num_ids:
                return tuple(draft_ids[:index])
        return tuple(draft_ids)
