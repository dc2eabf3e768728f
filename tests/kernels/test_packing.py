"""Packed weights against gguf's own dequantization, and rounding against the nearest value."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kernels import load_native
from engine.models.packing import Format
from tests.kernels.blocks import (
    QUANTIZED,
    aligned,
    dequantized,
    packed,
    packed_floats,
    random_blocks,
    unpacked,
)


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("rows", [16, 37])
def test_gguf_blocks_keep_every_value_exactly(quantization: str, rows: int) -> None:
    cols = 768
    blocks = random_blocks(quantization, rows, cols)
    matrix = packed(quantization, blocks, cols)
    np.testing.assert_array_equal(unpacked(matrix), dequantized(quantization, blocks))


@pytest.mark.parametrize("quantization", ["Q4_0", "Q8_0"])
def test_odd_group_counts_are_padded(quantization: str) -> None:
    cols = 32 * 3
    blocks = random_blocks(quantization, 20, cols)
    matrix = packed(quantization, blocks, cols)
    np.testing.assert_array_equal(unpacked(matrix), dequantized(quantization, blocks))


def test_rows_of_interleaved_rope_become_halves() -> None:
    heads, head_dim, cols = 3, 8, 64
    blocks = random_blocks("Q4_1", heads * head_dim, cols)
    matrix = packed("Q4_1", blocks, cols, rotary_heads=heads)
    pairs = dequantized("Q4_1", blocks).reshape(heads, head_dim // 2, 2, cols)
    np.testing.assert_array_equal(
        unpacked(matrix), pairs.swapaxes(1, 2).reshape(heads * head_dim, cols)
    )


@pytest.mark.parametrize(
    ("format_", "levels"), [(Format.Q8_SYMMETRIC, 254), (Format.Q4_AFFINE, 15)]
)
def test_rounding_stays_within_half_a_step(format_: Format, levels: int) -> None:
    weights = np.random.default_rng(0).standard_normal((33, 80)).astype(np.float32)
    error = np.abs(unpacked(packed_floats(weights, format_)) - weights)
    padded = np.zeros((33, 96), np.float32)
    padded[:, :80] = weights
    groups = padded.reshape(33, 3, 32)
    if format_ is Format.Q8_SYMMETRIC:
        extent = 2 * np.abs(groups).max(-1)
    else:
        extent = groups.max(-1) - groups.min(-1)
    # The scale and minimum are float16: up to 2^-11 of the largest value comes on top.
    bound = extent / levels / 2 + np.abs(groups).max(-1) * 2.0**-10
    assert (error <= np.repeat(bound, 32, axis=1)[:, :80]).all()
    assert error.max() > 0


def test_kept_floats_are_untouched() -> None:
    weights = np.random.default_rng(0).standard_normal((21, 19)).astype(np.float32)
    np.testing.assert_array_equal(unpacked(packed_floats(weights, Format.F32)), weights)


def test_sizes_that_do_not_fit_are_refused() -> None:
    native = load_native()
    with pytest.raises(ValueError, match="whole blocks of 256"):
        native.gguf_row_bytes(12, 320)
    with pytest.raises(ValueError, match="type 39 is not supported"):
        native.format_for_gguf(39)
    with pytest.raises(ValueError, match="smaller than the packed matrix"):
        native.PackedMatrix(int(Format.Q4_AFFINE), 16, 64, aligned(64))
    with pytest.raises(ValueError, match="output does not have"):
        native.pack_floats(
            native.ThreadPool(1), 0, np.zeros(4 * 32, np.uint8), int(Format.F32), 1, 32, aligned(64)
        )
