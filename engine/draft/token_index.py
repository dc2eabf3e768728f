"""Where the n-grams of a fixed text are, by their hashes: numpy makes these, without the GIL.

Of 2**64 hashes two can be equal; what is found is good enough for drafts, which are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_WORD = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_SPREAD = 0xD6E8FEB86659FD93
_CHUNK = 4096
"""Entries that are made while no other thread runs."""


@dataclass(frozen=True, slots=True)
class Ngram:
    """Tokens to be looked up, in any number of texts."""

    token_ids: tuple[int, ...]
    hash: int


def suffixes(token_ids: Sequence[int], lengths: range) -> list[Ngram]:
    """The n-grams that a text ends with, the longest first.

    Args:
        lengths: ascending by one; those greater than the text are left out.
    """
    found: list[Ngram] = []
    value, factor = 0, 1
    for length in range(1, min(lengths.stop, len(token_ids) + 1)):
        spread = (token_ids[-length] + 1) * _SPREAD & _WORD
        value = (value + (spread ^ spread >> 32) * factor) & _WORD
        factor = factor * _FACTOR & _WORD
        if length in lengths:
            found.append(Ngram(tuple(token_ids[-length:]), value))
    return found[::-1]


class TokenIndex:
    """All places of each n-gram."""

    def __init__(self, token_ids: Sequence[int], lengths: range) -> None:
        """
        Args:
            lengths: of the n-grams, ascending by one.
        """
        self._tables: dict[int, tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]] = {}
        for length, hashes in _hashes(token_ids, lengths):
            order = np.argsort(hashes, kind="stable")
            self._tables[length] = (hashes[order], (order + length).astype(np.int32))

    def ends(self, ngram: Ngram) -> npt.NDArray[np.int32]:
        """Positions behind each occurrence, ascending."""
        hashes, ends = self._tables[len(ngram.token_ids)]
        wanted = np.uint64(ngram.hash)
        return ends[hashes.searchsorted(wanted) : hashes.searchsorted(wanted, side="right")]


class ContinuationIndex:
    """The last place where each n-gram goes on."""

    def __init__(self, token_ids: Sequence[int], lengths: range) -> None:
        """
        Args:
            lengths: of the n-grams, ascending by one.
        """
        self.num_tokens = len(token_ids)
        self._position: dict[int, int] = {}
        for length, hashes in _hashes(token_ids, lengths):
            for start in range(0, self.num_tokens - length, _CHUNK):
                positions = range(start + length, min(start + length + _CHUNK, self.num_tokens))
                part = hashes[start : start + len(positions)].tolist()
                self._position.update(zip(part, positions, strict=True))

    def find(self, ngram: Ngram) -> int | None:
        """The position behind it."""
        return self._position.get(ngram.hash)


def _hashes(
    token_ids: Sequence[int], lengths: range
) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """Each length with the hashes of the n-grams that begin at positions 0, 1, ..."""
    ids = np.asarray(token_ids, np.uint64)
    spread = (ids + np.uint64(1)) * np.uint64(_SPREAD)
    spread ^= spread >> np.uint64(32)
    hashes = np.zeros(len(ids) + 1, np.uint64)
    factor = 1
    for length in range(1, lengths.stop):
        hashes = hashes[1:] + spread[: len(hashes[1:])] * np.uint64(factor)
        factor = factor * _FACTOR & _WORD
        if length in lengths:
            yield length, hashes
