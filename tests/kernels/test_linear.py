"""Linear layers: every variant against plain C++, and each row against itself in company."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels import load_native, native_available
from tests.kernels.blocks import (
    QUANTIZED,
    dequantized,
    packed,
    packed_floats,
    random_blocks,
)

VARIANTS = [] if native_available() else load_native().variants()
ROWS, COLS = 83, 768


def apply(
    variant: str, matrix: Any, x: npt.NDArray[np.float32], threads: int = 1, precise: bool = False
):
    native = load_native()
    out = np.full((len(x), matrix.rows), np.nan, np.float32)
    native.linear(native.ThreadPool(threads), variant, matrix, x, out, precise)
    return out


def inputs(count: int, cols: int = COLS, seed: int = 1) -> npt.NDArray[np.float32]:
    x = np.random.default_rng(seed).standard_normal((count, cols)).astype(np.float32)
    x[:, 5] *= 40.0  # an outlier, as real activations have
    return x


def rounded(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """x as signed 8-bit values with a scale per group of 32."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    quants = np.rint(groups * (np.float32(127.0) / largest))
    return (quants.astype(np.float64) * (largest / 127.0)).reshape(x.shape)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_plain_variant_is_the_product_with_rounded_activations(quantization: str) -> None:
    blocks = random_blocks(quantization, ROWS, COLS)
    x = inputs(5)
    expected = rounded(x) @ dequantized(quantization, blocks).astype(np.float64).T
    result = apply("scalar", packed(quantization, blocks, COLS), x)
    np.testing.assert_allclose(result, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "scalar"])
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_variants_agree_with_plain(variant: str, quantization: str) -> None:
    matrix = packed(quantization, random_blocks(quantization, ROWS, COLS), COLS)
    x = inputs(35)
    plain = apply("scalar", matrix, x)
    # Only the rounding of fused multiply-adds differs.
    np.testing.assert_allclose(
        apply(variant, matrix, x), plain, rtol=0, atol=1e-6 * np.abs(plain).max()
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_row_has_the_same_bits_in_any_company(
    variant: str, precise: bool, quantization: str
) -> None:
    matrix = packed(quantization, random_blocks(quantization, ROWS, COLS), COLS)
    x = inputs(140)
    together = apply(variant, matrix, x, precise=precise)
    for count in (*range(1, 18), 33):
        alone = apply(variant, matrix, x[:count], precise=precise)
        np.testing.assert_array_equal(alone, together[:count])
    last = apply(variant, matrix, x[139:], precise=precise)
    np.testing.assert_array_equal(last, together[139:])
    for threads in (2, 3):
        np.testing.assert_array_equal(apply(variant, matrix, x, threads, precise), together)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_precise_inputs_leave_a_hundredth_of_the_error(variant: str, quantization: str) -> None:
    blocks = random_blocks(quantization, ROWS, COLS)
    matrix = packed(quantization, blocks, COLS)
    x = inputs(21)
    exact = x.astype(np.float64) @ dequantized(quantization, blocks).astype(np.float64).T
    rounding = np.abs(apply(variant, matrix, x) - exact).max()
    assert np.abs(apply(variant, matrix, x, precise=True) - exact).max() < rounding / 100


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "Q6_K"])
def test_extreme_quants_do_not_overflow(variant: str, quantization: str) -> None:
    """All quants at an end of their range against activations at +-127."""
    for byte in (0x00, 0x80, 0x7F, 0xFF):
        blocks = random_blocks(quantization, 16, 256)
        scales = {"Q8_0": 2, "Q4_0": 2, "Q6_K": 0}[quantization]
        size = {"Q8_0": 34, "Q4_0": 18, "Q6_K": 208}[quantization]
        shaped = blocks.reshape(-1, {"Q6_K": 210}.get(quantization, size))
        shaped[:, scales:size] = byte
        x = np.ones((3, 256), np.float32)
        x[1] = -1.0
        x[2, ::2] = -1.0
        expected = x.astype(np.float64) @ dequantized(quantization, blocks).astype(np.float64).T
        result = apply(variant, packed(quantization, blocks, 256), x)
        np.testing.assert_allclose(
            result, expected, rtol=1e-5, atol=1e-5 * (np.abs(expected).max() + 1)
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format_", ["F32", "Q8_SYMMETRIC", "Q4_AFFINE"])
def test_odd_shapes_of_float_sources(variant: str, format_: str) -> None:
    weights = np.random.default_rng(3).standard_normal((29, 45)).astype(np.float32)
    matrix = packed_floats(weights, format_)
    x = inputs(19, 45)
    result = apply(variant, matrix, x)
    tolerance = {"F32": 1e-6, "Q8_SYMMETRIC": 0.02, "Q4_AFFINE": 0.15}[format_]
    expected = x @ weights.T
    assert np.abs(result - expected).max() <= tolerance * np.abs(expected).max()
    for count in (1, 4, 9):
        np.testing.assert_array_equal(apply(variant, matrix, x[:count]), result[:count])


def test_an_unknown_variant_is_named_with_the_ones_there_are() -> None:
    matrix = packed_floats(np.ones((16, 32), np.float32), "F32")
    with pytest.raises(ValueError, match=r"can't run the kernel variant 'mmx'; it has: .*scalar"):
        apply("mmx", matrix, np.ones((1, 32), np.float32))
