"""ngram: proposes what followed the last occurrence of the current suffix.

Prompt lookup decoding (Saxena, 2023) with an incremental index instead of a scan.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.draft.drafter import DraftRequest
from engine.sequence import TokenSequence


class _SuffixIndex:
    """Where each n-gram of a growing token list was last continued."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._lengths = range(max_match, min_match - 1, -1)
        self._continuation: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams that a token now follows."""
        for position in range(max(1, self._num_indexed), len(token_ids)):
            for length in self._lengths:
                if length <= position:
                    self._continuation[tuple(token_ids[position - length : position])] = position
        self._num_indexed = len(token_ids)

    def continuation(self, token_ids: Sequence[int]) -> int | None:
        """Position behind the latest earlier occurrence of the longest indexed suffix."""
        for length in self._lengths:
            position = self._continuation.get(tuple(token_ids[-length:]))
            if position is not None:
                return position
        return None


class NgramDrafter:
    """Drafts from the request's own prompt and output; costs no model pass."""

    name = "ngram"

    def __init__(self, *, min_match: int, max_match: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._indexes: dict[str, _SuffixIndex] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._propose(request) for request in requests]

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            self._index(sequence)

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def _propose(self, request: DraftRequest) -> tuple[int, ...]:
        token_ids = request.sequence.token_ids
        start = self._index(request.sequence).continuation(token_ids)
        if start is None:
            return ()
        draft = token_ids[start : start + request.max_tokens]
        # A match that reaches the end of the text is a cycle: it goes on as it went.
        period = len(token_ids) - start
        while len(draft) < request.max_tokens:
            draft.append(draft[len(draft) - period])
        return tuple(draft)

    def _index(self, sequence: TokenSequence) -> _SuffixIndex:
        index = self._indexes.get(sequence.request_id)
        if index is None:
            index = self._indexes[sequence.request_id] = _SuffixIndex(
                self._min_match, self._max_match
            )
        index.extend(sequence.token_ids)
        return index
