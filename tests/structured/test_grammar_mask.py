"""Bit masks over logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling.grammar_mask import (
    MaskBuffer,
    apply_mask,
    forbid_where_possible,
    num_mask_words,
)


def mask_of(*rows: set[int], vocab_size: int) -> np.ndarray:
    masks = np.zeros((len(rows), num_mask_words(vocab_size)), np.uint32)
    for index, allowed in enumerate(rows):
        for token_id in allowed:
            masks[index, token_id // 32] |= np.uint32(1 << token_id % 32)
    return masks.view(np.int32)


def allowed_in(masks: np.ndarray) -> list[set[int]]:
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


@pytest.mark.parametrize("vocab_size", [7, 32, 33, 95, 1000])
def test_what_is_not_allowed_becomes_impossible(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = [set(np.flatnonzero(rng.random(vocab_size) < share).tolist()) for share in (0.1, 0.5, 1)]
    logits = torch.randn(3, vocab_size)
    masked = logits.clone()
    apply_mask(masked, mask_of(*rows, vocab_size=vocab_size))
    for index, allowed in enumerate(rows):
        for token_id in range(vocab_size):
            kept = token_id in allowed
            expected = logits[index, token_id].item() if kept else -torch.inf
            assert masked[index, token_id].item() == expected


def test_masks_may_be_wider_than_the_logits() -> None:
    masked = torch.zeros(1, 40)
    apply_mask(masked, mask_of({3, 39, 70}, vocab_size=96))
    assert set((masked[0] == 0).nonzero()[:, 0].tolist()) == {3, 39}


def test_forbidding_spares_rows_that_allow_nothing_else() -> None:
    masks = mask_of({1, 2, 31, 32, 63}, {1, 63}, {5}, vocab_size=64)
    forbid_where_possible(masks, {1, 63, 31})
    assert allowed_in(masks) == [{2, 32}, {1, 63}, {5}]


def test_a_buffer_is_reused_and_its_rows_never_overlap() -> None:
    buffer = MaskBuffer()
    first, second = buffer.take(2, 3), buffer.take(4, 3)
    first[:], second[:] = 1, 2
    assert first.shape == (2, 3)
    assert (first == 1).all()
    buffer.clear()
    again, more = buffer.take(3, 3), buffer.take(1, 3)
    again[:], more[:] = 3, 4
    assert (again == 3).all()
    assert np.shares_memory(again, second)
