"""model: a draft model that shares the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.draft.draft_model import DraftModel, DraftPrompt, DraftTokens, DraftWish
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.following import FollowingDrafter
from engine.request import GenerationRequest
from engine.sampling.coupling import CoupledChooser
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


@dataclass(slots=True)
class _Follower:
    tokens: DraftTokens
    num_committed: int
    lost: bool = False
    """An id that only the target has was seen; the request gets no drafts."""


class ModelDrafter(FollowingDrafter[_Follower]):
    """Drafts token by token with a smaller model of the same vocabulary.

    Sampled requests are drafted with the noise the target will sample with (see
    `engine.sampling.noise`), so the two agree whenever their distributions nearly do.
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
        super().__init__(model)
        self._stop_ids = target_tokenizer.eos_ids
        self._num_ids = len(target_tokenizer.token_bytes)

    def preprocess(self, request: GenerationRequest, prediction_ids: Sequence[int]) -> DraftPrompt:
        return self.model.read(request.prompt_token_ids, request.cache_scope)

    def backlog(self, sequence: TokenSequence) -> int:
        follower = self._followers.get(sequence.request_id)
        if follower is None:
            return sequence.num_tokens
        return follower.tokens.num_missing + sequence.num_tokens - follower.num_committed

    def can_draft(self, sequence: TokenSequence) -> bool:
        follower = self._followers.get(sequence.request_id)
        lost = follower is not None and follower.lost
        return not lost and self.model.has_room(sequence.num_tokens + 1)

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        followers = [self._follow(s) for s in sequences if self.can_draft(s)]
        self.model.catch_up([f.tokens for f in followers if not f.lost])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        followers = [self._follow(request.sequence) for request in requests]
        self.model.catch_up([f.tokens for f in followers if self._is_far_behind(f)])
        drafted = self.model.draft(
            [f.tokens for f in followers],
            [self._wish(f, r) for f, r in zip(followers, requests, strict=True)],
            CoupledChooser([r.sequence for r in requests]),
            self._stop_ids,
        )
        return [Draft(self._known(token_ids)) for token_ids in drafted]

    def _is_far_behind(self, follower: _Follower) -> bool:
        return not follower.lost and self.model.exceeds_step(follower.tokens)

    def _wish(self, follower: _Follower, request: DraftRequest) -> DraftWish:
        room = self.model.has_room(request.sequence.num_tokens + request.max_tokens)
        hopeless = follower.lost or not room
        return DraftWish(0 if hopeless else request.max_tokens, request.least_certainty)

    def _follow(self, sequence: TokenSequence) -> _Follower:
        follower = self._followers.get(sequence.request_id)
        if follower is None:
            prompt: DraftPrompt = sequence.preparation.drafts[self.name]
            tokens = self.model.start(prompt)
            follower = _Follower(tokens, sequence.num_prompt, lost=not prompt.is_known)
            self._followers[sequence.request_id] = follower
        new = sequence.token_ids[follower.num_committed :]
        follower.lost = follower.lost or any(i >= self.model.vocab_size for i in new)
        follower.tokens.rewrite(follower.num_committed, new)
        follower.num_committed = sequence.num_tokens
        return follower

    def _known(self, token_ids: list[int]) -> tuple[int, ...]:
        """Up to a padding id, which the target has no token for."""
        for index, token_id in enumerate(token_ids):
            if token_id >= self._num_ids:
                return tuple(token_ids[:index])
        return tuple(token_ids)
