"""Bit masks over the vocabulary: which tokens a grammar allows."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

BitMask = npt.NDArray[np.int32]
"""int32[N, ceil(V / 32)]: bit i of word w allows token 32 * w + i."""

_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_BITS_OF_BYTE = np.unpackbits(_BYTES, axis=1, bitorder="little")
_BIAS_OF_BYTE = torch.from_numpy(np.where(_BITS_OF_BYTE == 1, 0.0, -np.inf).astype(np.float32))


class MaskBuffer:
    """Memory for the masks of one step; it grows to the largest step seen and is then reused."""

    def __init__(self) -> None:
        self._rows: BitMask = np.empty((0, 0), np.int32)
        self._used = 0

    def clear(self) -> None:
        """Give all rows free; the views handed out before must no longer be used."""
        self._used = 0

    def take(self, count: int, num_words: int) -> BitMask:
        """A view of `count` rows of `num_words` words, whatever they hold."""
        needed = self._used + count
        if needed > len(self._rows) or num_words != self._rows.shape[1]:
            self._rows = np.empty((max(needed, 2 * len(self._rows)), num_words), np.int32)
        start, self._used = self._used, needed
        return self._rows[start:needed]


def num_mask_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def forbid_where_possible(masks: BitMask, token_ids: Collection[int]) -> None:
    """Clear tokens in place in every row that allows others too."""
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    forbidden = np.zeros(masks.shape[1], np.uint32)
    np.bitwise_or.at(forbidden, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    kept = masks & ~forbidden.view(np.int32)
    others = kept.any(axis=1)
    masks[others] = kept[others]


def apply_mask(logits: torch.Tensor, masks: BitMask) -> None:
    """Set what the masks do not allow to -inf, in place.

    Each byte of a mask selects eight addends from a table: several times faster on a CPU than
    spreading the bits and filling, and the same code on a GPU.

    Args:
        logits: float32[N, V].
        masks: N rows of at least V bits.
    """
    packed = torch.from_numpy(masks).view(torch.uint8).to(logits.device)
    bias = functional.embedding(packed.int(), _BIAS_OF_BYTE.to(logits.device))
    logits += bias.view(len(masks), -1)[:, : logits.shape[1]]
