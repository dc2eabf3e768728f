"""ngram: proposes what followed the last occurrence of the current suffix.

Prompt lookup decoding (Saxena, 2023) with an incremental index instead of a scan.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachetools import FIFOCache

from engine.draft.drafter import NO_DRAFT, Draft, DrafterResources, DraftRequest, FreeDrafter
from engine.draft.suffix_index import SuffixIndex
from engine.draft.token_index import ContinuationIndex, Ngram, suffixes
from engine.request import GenerationRequest
from engine.scheduling.sequence import TokenSequence


class SharedTexts:
    """The last texts of all requests, up to a number of tokens, with the index each had.

    Text of one client can show in what is drafted for another (never in the output, but in its
    timing), so this is only used when asked for.
    """

    def __init__(self, *, max_tokens: int, max_match: int) -> None:
        self._max_match = max_match
        self._texts = FIFOCache[str, tuple[list[int], SuffixIndex]](
            max_tokens, lambda text: text[1].num_indexed
        )

    def add(self, request_id: str, token_ids: list[int], index: SuffixIndex) -> None:
        """Keep a request's text, in place of its earlier one; the oldest texts make room for it.

        Args:
            index: of the text; one of more tokens than there is room for is not kept.
        """
        self._texts.pop(request_id, None)
        if index.num_indexed <= self._texts.maxsize:
            self._texts[request_id] = (token_ids, index)

    def find(self, ngrams: Sequence[Ngram]) -> tuple[list[int], int, int] | None:
        """(text, position, match length) of the longest match, the latest text first."""
        best: tuple[list[int], int, int] | None = None
        for text, index in reversed(list(self._texts.values())):
            found = index.find(ngrams)
            if found is not None and (best is None or found[1] > best[2]):
                best = (text, *found)
                if found[1] == self._max_match:
                    break
        return best


class NgramDrafter(FreeDrafter):
    """Drafts from the request's own prompt and output; costs no model pass."""

    name = "ngram"

    def __init__(
        self, *, min_match: int, max_match: int, shared: SharedTexts | None = None
    ) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._lengths = range(min_match, max_match + 1)
        self._shared = shared
        self._indexes: dict[str, tuple[TokenSequence, SuffixIndex]] = {}

    @classmethod
    def create(cls, resources: DrafterResources) -> NgramDrafter:
        speculation = resources.speculation
        longest = speculation.ngram_max
        shared = None
        if speculation.ngram_shared:
            shared = SharedTexts(max_tokens=speculation.ngram_shared_tokens, max_match=longest)
        return cls(min_match=speculation.ngram_min, max_match=longest, shared=shared)

    def preprocess(
        self, request: GenerationRequest, prediction_ids: Sequence[int]
    ) -> ContinuationIndex:
        return ContinuationIndex(request.prompt_token_ids, self._lengths)

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            self._index(sequence)

    def forget(self, request_id: str) -> None:
        entry = self._indexes.pop(request_id, None)
        if entry is not None and self._shared is not None:
            sequence, index = entry
            self._shared.add(request_id, sequence.token_ids, index)

    def propose_one(self, request: DraftRequest) -> Draft:
        token_ids = request.sequence.token_ids
        ngrams = suffixes(token_ids, self._lengths)
        found = self._index(request.sequence).find(ngrams)
        own_length = found[1] if found else 0
        if self._shared is not None and own_length < self._max_match:
            shared = self._shared.find(ngrams)
            if shared is not None and shared[2] > own_length:
                text, start, length = shared
                return Draft(tuple(text[start : start + request.max_tokens]), length)
        if found is None:
            return NO_DRAFT
        start, length = found
        draft = token_ids[start : start + request.max_tokens]
        # A match that reaches the end of the text is a cycle: it goes on as it went.
        period = len(token_ids) - start
        while len(draft) < request.max_tokens:
            draft.append(draft[len(draft) - period])
        return Draft(tuple(draft), length)

    def _index(self, sequence: TokenSequence) -> SuffixIndex:
        entry = self._indexes.get(sequence.request_id)
        if entry is None:
            beginning = sequence.preparation.drafts[self.name]
            entry = (sequence, SuffixIndex(self._min_match, self._max_match, beginning))
            self._indexes[sequence.request_id] = entry
        entry[1].extend(sequence.token_ids)
        return entry[1]
