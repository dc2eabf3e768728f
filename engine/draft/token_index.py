"""TokenIndex: where the n-grams of a fixed text are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_WORD = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_SPREAD = 0xD6E8FEB86659FD93


class TokenIndex:
    """Finds a text's n-grams by their hashes, sorted: numpy builds it, mostly without the GIL.

    Never changed once it is made. Of 2**64 hashes two can be equal; what is found is good enough
    for drafts, which are checked.
    """

    def __init__(self, token_ids: Sequence[int], lengths: range) -> None:
        """
        Args:
            token_ids: the text.
            lengths: of the n-grams, ascending by one.
        """
        ids = np.asarray(token_ids, np.uint64)
        self.num_tokens = len(ids)
        self._tables: dict[int, tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]] = {}
        spread = (ids + np.uint64(1)) * np.uint64(_SPREAD)
        spread ^= spread >> np.uint64(32)
        hashes = np.zeros(len(ids) + 1, np.uint64)
        factor = 1
        for length in range(1, lengths.stop):
            # hashes[i] is of the `length` tokens from position i on.
            hashes = hashes[1:] + spread[: len(hashes[1:])] * np.uint64(factor)
            factor = factor * _FACTOR & _WORD
            if length in lengths and len(hashes):
                order = np.argsort(hashes, kind="stable")
                ends = (order + length).astype(np.int32)
                self._tables[length] = (hashes[order], ends)

    def ends(self, suffix_of: Sequence[int], length: int) -> npt.NDArray[np.int32]:
        """Positions behind each occurrence of a text's last `length` tokens, ascending."""
        hashes, ends = self._tables.get(length, _NOTHING)
        wanted = np.uint64(_hash(suffix_of[-length:]))
        first = int(hashes.searchsorted(wanted))
        last = int(hashes.searchsorted(wanted, side="right"))
        return ends[first:last]


_NOTHING = (np.empty(0, np.uint64), np.empty(0, np.int32))


def _hash(token_ids: Sequence[int]) -> int:
    """As in the tables: the last token counts once, the one before it `_FACTOR` times, ..."""
    value = 0
    for token_id in token_ids:
        spread = (token_id + 1) * _SPREAD & _WORD
        value = (value * _FACTOR + (spread ^ spread >> 32)) & _WORD
    return value
