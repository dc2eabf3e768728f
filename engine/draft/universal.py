"""universal: a draft model with any tokenizer, matched to the target on text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.draft.draft_model import DraftModel, DraftPrompt, DraftTokens, DraftWish
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.following import FollowingDrafter
from engine.draft.text_sync import continuation_of, encode_behind, split_whole_characters
from engine.request import ChatPrompt, GenerationRequest, RequestError, TextPrompt
from engine.sampling.coupling import CoupledChooser
from engine.scheduling.sequence import TokenSequence
from engine.text.alignment import aligned_ids
from engine.text.tokenizer import TextTokenizer


@dataclass(slots=True)
class _Follower:
    """How far the draft model has followed one request's text."""

    tokens: DraftTokens
    num_committed: int
    """Draft tokens that stand for the prompt and committed output; drafted ones come behind."""
    num_followed: int = 0
    """Target output tokens taken over so far."""
    pending: bytes = b""
    """First bytes of a character that the committed output has not finished."""
    lost: bool = False
    """The text can't be followed any more; the request gets no drafts."""


class UniversalDrafter(FollowingDrafter[_Follower]):
    """Drafts with a small model of any tokenizer, batched over requests.

    Where a draft token is also a token of the target, sampled requests draw it with the noise the
    target will draw (see `engine.sampling.noise`).

    In chat the draft model sees the same messages under its own template, so that the target's
    markup never reaches it as text, and its end of turn stands for the target's.
    """

    name = "universal"

    def __init__(
        self, model: DraftModel, tokenizer: TextTokenizer, target_tokenizer: TextTokenizer
    ) -> None:
        super().__init__(model)
        self._tokenizer = tokenizer
        self._target_tokenizer = target_tokenizer
        self._noise_ids = _noise_ids(model.vocab_size, tokenizer, target_tokenizer)

    def preprocess(self, request: GenerationRequest, prediction_ids: Sequence[int]) -> DraftPrompt:
        return self.model.read(encode_prompt(request.source, self._tokenizer), request.cache_scope)

    def backlog(self, sequence: TokenSequence) -> int:
        follower = self._followers.get(sequence.request_id)
        if follower is None:
            return sequence.num_tokens
        return follower.tokens.num_missing + sequence.num_output - follower.num_followed

    def can_draft(self, sequence: TokenSequence) -> bool:
        follower = self._followers.get(sequence.request_id)
        return follower is None or not (follower.lost or self._is_full(follower, 1))

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        followers = [self._follower(sequence) for sequence in sequences]
        self.model.catch_up([f.tokens for f in followers if not (f.lost or self._is_full(f, 1))])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        followers = [self._follower(request.sequence) for request in requests]
        for follower, request in zip(followers, requests, strict=True):
            self._follow(follower, request.sequence)
        self.model.catch_up([f.tokens for f in followers if self._is_far_behind(f)])
        drafted = self.model.draft(
            [f.tokens for f in followers],
            [self._wish(f, r) for f, r in zip(followers, requests, strict=True)],
            CoupledChooser([r.sequence for r in requests], self._noise_ids),
            self._tokenizer.eos_ids,
        )
        return [
            Draft(self._translate(follower, request, draft_ids))
            for follower, request, draft_ids in zip(followers, requests, drafted, strict=True)
        ]

    def _is_far_behind(self, follower: _Follower) -> bool:
        return not follower.lost and self.model.exceeds_step(follower.tokens)

    def _is_full(self, follower: _Follower, num_more: int) -> bool:
        return not self.model.has_room(len(follower.tokens.token_ids) + num_more)

    def _wish(self, follower: _Follower, request: DraftRequest) -> DraftWish:
        hopeless = follower.lost or self._is_full(follower, request.max_tokens)
        return DraftWish(0 if hopeless else request.max_tokens, request.least_certainty)

    def _follower(self, sequence: TokenSequence) -> _Follower:
        follower = self._followers.get(sequence.request_id)
        if follower is None:
            prompt: DraftPrompt = sequence.preparation.drafts[self.name]
            tokens = self.model.start(prompt)
            follower = _Follower(tokens, len(prompt.token_ids), lost=not prompt.is_known)
            self._followers[sequence.request_id] = follower
        return follower

    def _follow(self, follower: _Follower, sequence: TokenSequence) -> None:
        """Take over newly committed output; drafted tokens that turned out right keep their KV."""
        new = sequence.token_ids[sequence.num_prompt + follower.num_followed :]
        follower.num_followed += len(new)
        target = self._target_tokenizer
        if follower.lost:
            return
        if any(i in target.special_ids or i >= len(target.token_bytes) for i in new):
            follower.lost = True
            return
        data = follower.pending + target.bytes_of(new)
        whole, follower.pending = split_whole_characters(data)
        if not whole:
            follower.tokens.rewrite(follower.num_committed, ())
            return
        committed = follower.tokens.token_ids[: follower.num_committed]
        encoded = encode_behind(committed, whole, self._tokenizer, follower.tokens.num_prompt)
        if encoded is None:
            follower.lost = True
            return
        start, ids = encoded
        follower.tokens.rewrite(start, ids)
        follower.num_committed = start + len(ids)

    def _translate(
        self, follower: _Follower, request: DraftRequest, draft_ids: list[int]
    ) -> tuple[int, ...]:
        """Target tokens for what the draft model wrote; empty where the two don't meet."""
        text_ids, ends = self._readable(draft_ids)
        data = self._tokenizer.bytes_of(text_ids)
        if not data.startswith(follower.pending):
            return ()
        data = data[len(follower.pending) :]
        ids = continuation_of(request.sequence.token_ids, data, self._target_tokenizer)
        end_id = self._end_id(request.sequence.request.source)
        if ends and end_id is not None and self._target_tokenizer.bytes_of(ids) == data:
            ids.append(end_id)
        return tuple(ids[: request.max_tokens])

    def _readable(self, draft_ids: list[int]) -> tuple[list[int], bool]:
        """Leading draft tokens that stand for text, and whether the draft ends behind them."""
        tokenizer = self._tokenizer
        for index, token_id in enumerate(draft_ids):
            ends = token_id in tokenizer.eos_ids
            if ends or token_id in tokenizer.special_ids or token_id >= len(tokenizer.token_bytes):
                return draft_ids[:index], ends
        return draft_ids, False

    def _end_id(self, source: ChatPrompt | TextPrompt) -> int | None:
        target = self._target_tokenizer
        if isinstance(source, ChatPrompt) and target.end_of_turn_id is not None:
            return target.end_of_turn_id
        return target.end_of_text_id


def encode_prompt(source: ChatPrompt | TextPrompt, tokenizer: TextTokenizer) -> list[int]:
    """A request's prompt for a model of its own tokenizer and chat template."""
    if isinstance(source, TextPrompt):
        return tokenizer.encode(source.text)
    if tokenizer.has_chat_template:
        try:
            return tokenizer.encode_chat(source.messages, source.options)
        except RequestError:
            pass  # a template that wants other roles: the plain conversation below serves
    turns = [f"{message['role']}: {message['content']}\n\n" for message in source.messages]
    return tokenizer.encode("".join([*turns, "assistant: "]))


def _noise_ids(vocab_size: int, draft: TextTokenizer, target: TextTokenizer) -> torch.Tensor:
    """The target's id of each draft token; tokens the target lacks get ids of their own."""
    aligned = aligned_ids(draft, target)
    ids = torch.arange(vocab_size) + len(target.token_bytes)
    for token_id, target_id in enumerate(aligned[:vocab_size]):
        if target_id is not None:
            ids[token_id] = target_id
    return ids
