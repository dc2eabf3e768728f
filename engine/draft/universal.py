"""universal: a draft model with any tokenizer, matched to the target on text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.draft.draft_model import DraftModel, DraftPrompt
from engine.draft.draft_model_drafter import DraftModelDrafter, DraftState
from engine.draft.draft_prompt import encode_draft_prompt
from engine.draft.drafter import DraftRequest
from engine.draft.reencoding import continuation_of, encode_behind, split_whole_characters
from engine.request import ChatPrompt, GenerationRequest, TextPrompt
from engine.sampling.coupling import CoupledSampler, noise_ids_of
from engine.scheduling.sequence import TokenSequence
from engine.text.alignment import aligned_ids
from engine.text.tokenizer import TextTokenizer


@dataclass(slots=True)
class _UniversalState(DraftState):
    num_committed: int
    """Draft tokens that stand for what is committed; drafted ones come behind."""
    pending: bytes = b""
    """First bytes of a character that the committed output has not finished."""


class UniversalDrafter(DraftModelDrafter[_UniversalState]):
    """Drafts with a small model of any tokenizer; texts cross over as `reencoding` says.

    Where a draft token is also a token of the target, sampled requests draw it with the noise the
    target will draw. In chat the draft's end of turn stands for the target's, and its prompt is
    that of `encode_draft_prompt`.
    """

    name = "universal"

    def __init__(
        self, model: DraftModel, tokenizer: TextTokenizer, target_tokenizer: TextTokenizer
    ) -> None:
        super().__init__(model, tokenizer, target_tokenizer)
        self._noise_ids = noise_ids_of(
            aligned_ids(tokenizer, target_tokenizer),
            vocab_size=model.vocab_size,
            num_target_ids=len(target_tokenizer.token_bytes),
        )

    def preprocess(self, request: GenerationRequest, prediction_ids: Sequence[int]) -> DraftPrompt:
        token_ids = encode_draft_prompt(request.source, self._tokenizer)
        return self.model.prepare_prompt(token_ids, request.cache_scope)

    def can_draft(self, sequence: TokenSequence) -> bool:
        state = self._states.get(sequence.request_id)
        return state is None or not (state.is_lost or self._is_full(state, 1))

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        states = [self._state(sequence) for sequence in sequences]
        self.model.prefill([s.draft for s in states if not (s.is_lost or self._is_full(s, 1))])

    @property
    def _stop_ids(self) -> frozenset[int]:
        return self._tokenizer.eos_ids

    def _sampler(self, sequences: Sequence[TokenSequence]) -> CoupledSampler:
        return CoupledSampler(sequences, self._noise_ids)

    def _start(self, sequence: TokenSequence) -> _UniversalState:
        prompt: DraftPrompt = sequence.preparation.drafts[self.name]
        return _UniversalState(
            self.model.start(prompt),
            num_followed=sequence.num_prompt,
            is_lost=not prompt.is_known,
            num_committed=len(prompt.token_ids),
        )

    def _followed(self, sequence: TokenSequence) -> _UniversalState:
        """Drafted tokens that turned out right keep their KV."""
        state = self._state(sequence)
        new = sequence.token_ids[state.num_followed :]
        state.num_followed += len(new)
        target = self._target_tokenizer
        if state.is_lost:
            return state
        if any(i in target.special_ids or i >= len(target.token_bytes) for i in new):
            state.is_lost = True
            return state
        whole, state.pending = split_whole_characters(state.pending + target.bytes_of(new))
        if whole:
            self._append(state, whole)
        else:
            state.draft.rewrite(state.num_committed, ())
        return state

    def _append(self, state: _UniversalState, text: bytes) -> None:
        """Take over committed text, whole characters, in place of what was drafted."""
        committed = state.draft.token_ids[: state.num_committed]
        encoded = encode_behind(committed, text, self._tokenizer, state.draft.num_prompt)
        if encoded is None:
            state.is_lost = True
            return
        start, ids = encoded
        state.draft.rewrite(start, ids)
        state.num_committed = start + len(ids)

    def _translate(
        self, state: _UniversalState, request: DraftRequest, draft_ids: Sequence[int]
    ) -> tuple[int, ...]:
        """Empty where the two tokenizers don't meet."""
        text_ids, ends = self._readable(draft_ids)
        data = self._tokenizer.bytes_of(text_ids)
        if not data.startswith(state.pending):
            return ()
        data = data[len(state.pending) :]
        ids = continuation_of(request.sequence.token_ids, data, self._target_tokenizer)
        end_id = self._end_id(request.sequence.request.source)
        if ends and end_id is not None and self._target_tokenizer.bytes_of(ids) == data:
            ids.append(end_id)
        return tuple(ids[: request.max_tokens])

    def _readable(self, draft_ids: Sequence[int]) -> tuple[Sequence[int], bool]:
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
