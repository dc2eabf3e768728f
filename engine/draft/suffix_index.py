"""SuffixIndex: where the n-grams of a growing token list were last continued."""

from __future__ import annotations

from collections.abc import Sequence


class SuffixIndex:
    """Maps each n-gram of min_match to max_match tokens to the position behind it.

    Extending costs a few dictionary writes a token; nothing is ever scanned again.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._lengths = range(max_match, min_match - 1, -1)
        self._continuation: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams that a token now follows; a later occurrence replaces an earlier."""
        for position in range(max(1, self._num_indexed), len(token_ids)):
            for length in self._lengths:
                if length <= position:
                    self._continuation[tuple(token_ids[position - length : position])] = position
        self._num_indexed = len(token_ids)

    def find(self, suffix_of: Sequence[int]) -> tuple[int, int] | None:
        """(position, match length) behind the last occurrence of the longest indexed suffix."""
        for length in self._lengths:
            if length > len(suffix_of):
                continue
            position = self._continuation.get(tuple(suffix_of[-length:]))
            if position is not None:
                return position, length
        return None
