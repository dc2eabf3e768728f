"""SuffixIndex: where the n-grams of a growing token list were last continued."""

from __future__ import annotations

from collections.abc import Sequence

from engine.draft.token_index import ContinuationIndex, Ngram


class SuffixIndex:
    """Maps each n-gram of min_match to max_match tokens to the position behind it.

    Extending costs a few dictionary writes a token; nothing is ever scanned again, and the tokens
    that the list began with come indexed.
    """

    def __init__(self, min_match: int, max_match: int, beginning: ContinuationIndex) -> None:
        """
        Args:
            beginning: index of the first tokens, with n-grams of all these lengths.
        """
        self._lengths = range(max_match, min_match - 1, -1)
        self._beginning = beginning
        self._continuation: dict[tuple[int, ...], int] = {}
        self.num_indexed = beginning.num_tokens
        """Tokens of the list that are taken in."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams that a token now follows; a later occurrence replaces an earlier."""
        for position in range(max(1, self.num_indexed), len(token_ids)):
            for length in self._lengths:
                if length <= position:
                    self._continuation[tuple(token_ids[position - length : position])] = position
        self.num_indexed = len(token_ids)

    def find(self, ngrams: Sequence[Ngram]) -> tuple[int, int] | None:
        """(position, match length) behind the last occurrence of the first that is indexed.

        Args:
            ngrams: such as `suffixes` gives, the longest first.
        """
        for ngram in ngrams:
            position = self._continuation.get(ngram.token_ids)
            if position is None:
                position = self._beginning.find(ngram)
            if position is not None:
                return position, len(ngram.token_ids)
        return None
