"""GrammarMatcher: where one request stands in its grammar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher

from engine.sampling.grammar_compiler import readable
from engine.sampling.grammar_mask import BitMask
from engine.scheduling.sequence import TokenSequence

_ALL_TOKENS = -1


@dataclass(frozen=True, slots=True)
class GrammarCheck:
    """What a grammar says to a draft."""

    masks: BitMask
    """A row for each token to sample: behind the committed tokens, and behind each draft token."""
    num_rows: int
    """Leading rows that count; those behind a draft token that is not allowed don't."""
    error: str | None = None
    """Why nothing can follow the committed tokens, when `num_rows` is 0."""


class GrammarMatcher:
    """Only committed tokens move it for good; drafts are tried and taken back.

    Matchers of one grammar share its lexer, which learns as it goes. When any of them, on any
    path, exceeds the library's limits, the lexer is broken for all. So a matcher that meets an
    error goes on with a lexer of its own, and from then on keeps away from drafts: whether the
    grammar can follow an output depends on the output alone.
    """

    def __init__(self, start: LLMatcher, renew: Callable[[], LLMatcher]) -> None:
        """
        Args:
            start: a matcher at the beginning of the grammar; it is copied, not changed.
            renew: makes another one, which shares nothing with it.
        """
        self._matcher = start.deep_copy()
        self._renew = renew
        self._isolated = False
        self._is_valid = True
        self._num_consumed = 0

    def catch_up(self, sequence: TokenSequence) -> None:
        """Move over the output tokens committed since the last call."""
        if not self._is_valid:
            self._isolate(sequence)
        new = sequence.token_ids[sequence.num_prompt + self._num_consumed :]
        if new:
            self._matcher.consume_tokens(new)
            self._num_consumed += len(new)

    def invalidate(self) -> None:
        """Start anew at the next `catch_up`: an exception may have left the matcher anywhere."""
        self._is_valid = False

    def forced(self) -> list[int]:
        """Tokens that must come next, as the tokenizer would split their text."""
        return self._matcher.compute_ff_tokens()

    def check(self, sequence: TokenSequence, draft: list[int], masks: BitMask) -> GrammarCheck:
        """Fill the masks for a draft behind a sequence that has been caught up with.

        Args:
            masks: len(draft) + 1 rows; those that don't count are filled with ones.
        """
        num_rows = self._try([] if self._isolated else draft, masks)
        if self._matcher.is_error() and not self._isolated:
            self._isolate(sequence)
            if not num_rows:
                num_rows = self._try([], masks)
        masks[num_rows:] = _ALL_TOKENS
        return GrammarCheck(masks, num_rows, None if num_rows else self._why_stuck())

    def _try(self, draft: list[int], masks: BitMask) -> int:
        """Fill masks along a draft, as far as the grammar allows it, and go back."""
        num_allowed = self._matcher.validate_tokens(draft) if draft else 0
        num_rows = num_tried = 0
        while self._fill(masks[num_rows]):
            num_rows += 1
            if num_rows > num_allowed:
                break
            self._matcher.consume_token(draft[num_tried])
            num_tried += 1
        if num_tried:
            self._matcher.rollback(num_tried)
        return num_rows

    def _fill(self, row: BitMask) -> bool:
        """Whether any token is allowed."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return not self._matcher.is_error() and bool(row.any())

    def _isolate(self, sequence: TokenSequence) -> None:
        self._isolated = True
        self._matcher = self._renew()
        self._is_valid = True
        self._num_consumed = 0
        self.catch_up(sequence)

    def _why_stuck(self) -> str:
        detail = readable(self._matcher.get_error())
        return f"The grammar allows no further token{': ' if detail else ''}{detail}."
