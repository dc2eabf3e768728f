"""Packed weights against gguf's own dequantization, and rounding against the nearest value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels import load_native
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


def grouped(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[rows, groups, 32], padded with zeros."""
    rows, cols = weights.shape
    padded = np.zeros((rows, -(-cols // 32) * 32), np.float32)
    padded[:, :cols] = weights
    return padded.reshape(rows, -1, 32)


def between_extremes(groups: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """To 4 bits between each group's least and largest value."""
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step = (high - low) / 15
    return low + np.round((groups - low) / step) * step


def around_zero(groups: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """To 4 bits, the largest value being eight steps from zero."""
    at = np.abs(groups).argmax(-1, keepdims=True)
    step = np.take_along_axis(groups, at, -1) / -8
    return np.asarray(np.clip(np.round(groups / step), -8, 7) * step, np.float32)


def test_rounding_to_int8_stays_within_half_a_step() -> None:
    weights = np.random.default_rng(0).standard_normal((33, 80)).astype(np.float32)
    error = np.abs(grouped(unpacked(packed_floats(weights, "Q8_SYMMETRIC")) - weights))
    largest = np.abs(grouped(weights)).max(-1, keepdims=True)
    # The scale is float16: up to 2^-11 of the largest value comes on top.
    assert (error <= largest / 127 / 2 + largest * 2.0**-10).all()
    assert error.max() > 0


@pytest.mark.parametrize(
    ("format_", "plainly"),
    [("Q4_AFFINE", between_extremes), ("Q4_SYMMETRIC", around_zero)],
)
def test_rounding_to_int4_errs_less_than_by_the_extremes(
    format_: str, plainly: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
) -> None:
    weights = np.random.default_rng(0).standard_normal((33, 80)).astype(np.float32)
    groups = grouped(weights)
    error = grouped(unpacked(packed_floats(weights, format_)) - weights)
    plain_error = plainly(groups) - groups
    assert 0 < (error**2).mean() < 0.9 * (plain_error**2).mean()
    # The scale and minimum are float16.
    largest = np.abs(groups).max(-1)
    assert ((error**2).mean(-1) <= (plain_error**2).mean(-1) + (largest * 2.0**-10) ** 2).all()


@pytest.mark.parametrize("format_", ["Q4_AFFINE", "Q4_SYMMETRIC"])
@pytest.mark.parametrize("quantization", ["Q5_0", "Q8_0", "Q6_K", "Q5_1"])
def test_blocks_round_to_int4_as_their_values_would(quantization: str, format_: str) -> None:
    blocks = random_blocks(quantization, 33, 256)
    values = dequantized(quantization, blocks)
    rounded = unpacked(packed(quantization, blocks, 256, format_=format_))
    np.testing.assert_array_equal(rounded, unpacked(packed_floats(values, format_)))


def test_blocks_pack_to_no_other_format() -> None:
    with pytest.raises(ValueError, match="int8, int4 or the format"):
        packed("Q4_0", random_blocks("Q4_0", 16, 64), 64, format_="Q6_SUPER")


def test_kept_floats_are_untouched() -> None:
    weights = np.random.default_rng(0).standard_normal((21, 19)).astype(np.float32)
    np.testing.assert_array_equal(unpacked(packed_floats(weights, "F32")), weights)


@pytest.mark.parametrize("type_", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("kept", [True, False])
def test_floats_pack_from_any_address(type_: str, kept: bool) -> None:
    """A tensor begins where the JSON header of its file ends; only a sanitizer sees the harm."""
    native = load_native()
    rows, cols = 21, 70
    values = np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32)
    dtypes = {"F32": values.view("<u4"), "BF16": (values.view("<u4") >> 16).astype("<u2")}
    source = dtypes.get(type_, values.astype(np.float16)).reshape(-1).view(np.uint8)
    from_, to = native.Format[type_], native.Format[type_ if kept else "Q8_SYMMETRIC"]
    packed_at = []
    for offset in (0, 1, 2, 3):
        memory = aligned(source.size + 3)
        memory[offset : offset + source.size] = source
        out = aligned(native.packed_bytes(to, rows, cols))
        piece = memory[offset : offset + source.size]
        native.pack_floats(native.ThreadPool(1), from_, piece, to, rows, cols, out)
        packed_at.append(out.tobytes())
    assert len(set(packed_at)) == 1


def test_sizes_that_do_not_fit_are_refused() -> None:
    native = load_native()
    f32 = native.Format.F32
    with pytest.raises(ValueError, match="whole blocks of 256"):
        native.gguf_row_bytes(12, 320)
    with pytest.raises(ValueError, match="no packed format holds GGUF tensor type 39"):
        native.format_for_gguf(39)
    with pytest.raises(ValueError, match="smaller than the packed matrix"):
        native.PackedMatrix(native.Format.Q4_AFFINE, 16, 64, aligned(64))
    with pytest.raises(ValueError, match="output does not have"):
        native.pack_floats(
            native.ThreadPool(1), f32, np.zeros(4 * 32, np.uint8), f32, 1, 32, aligned(64)
        )
