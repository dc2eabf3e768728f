"""A NaN or infinity in one lane comes out as NaN, never as a finite number."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.kernels.blocks import SCALE_OFFSETS, packed, packed_floats, random_blocks, unpacked
from tests.kernels.test_linear import VARIANTS, apply, inputs

NOT_FINITE = (math.nan, math.inf, -math.inf)
ROWS, COLS = 37, 96
FLOATS = ("F32", "Q8_SYMMETRIC", "Q4_AFFINE", "Q4_SYMMETRIC")
ROUNDED = FLOATS[1:]


def weights() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((ROWS, COLS)).astype(np.float32)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("format_", FLOATS)
def test_in_one_lane_of_the_input_it_spoils_its_row_alone(
    variant: str, precise: bool, format_: str
) -> None:
    matrix = packed_floats(weights(), format_)
    for count, bad in ((1, 0), (5, 2), (19, 17)):
        clean = inputs(count, COLS)
        expected = apply(variant, matrix, clean, precise=precise)
        for column in range(COLS):
            x = clean.copy()
            x[bad, column] = NOT_FINITE[column % 3]
            result = apply(variant, matrix, x, precise=precise)
            assert np.isnan(result[bad]).all(), f"column {column}"
            others = np.arange(count) != bad
            np.testing.assert_array_equal(result[others], expected[others])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format_", FLOATS)
def test_in_one_weight_it_spoils_that_output_alone(variant: str, format_: str) -> None:
    x = inputs(6, COLS)
    expected = apply(variant, packed_floats(weights(), format_), x)
    for column in range(COLS):
        spoilt = weights()
        spoilt[21, column] = NOT_FINITE[column % 3]
        result = apply(variant, packed_floats(spoilt, format_), x)
        assert np.isnan(result[:, 21]).all(), f"column {column}"
        np.testing.assert_array_equal(np.delete(result, 21, 1), np.delete(expected, 21, 1))


@pytest.mark.parametrize("format_", ROUNDED)
def test_a_rounded_group_with_it_is_no_number_anywhere(format_: str) -> None:
    for column in range(COLS):
        spoilt = weights()
        spoilt[3, column] = NOT_FINITE[column % 3]
        group = np.zeros((ROWS, COLS), bool)
        group[3, column // 32 * 32 : column // 32 * 32 + 32] = True
        np.testing.assert_array_equal(np.isnan(unpacked(packed_floats(spoilt, format_))), group)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantization", SCALE_OFFSETS)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_as_a_scale_of_a_block_it_spoils_that_output_alone(
    variant: str, quantization: str, value: float
) -> None:
    x = inputs(6, 512)
    blocks = random_blocks(quantization, ROWS, 512)
    expected = apply(variant, packed(quantization, blocks, 512), x)
    for offset in SCALE_OFFSETS[quantization]:
        spoilt = blocks.copy()
        spoilt[21, offset : offset + 2] = np.array([value], np.float16).view(np.uint8)
        result = apply(variant, packed(quantization, spoilt, 512), x)
        assert np.isnan(result[:, 21]).all()
        np.testing.assert_array_equal(np.delete(result, 21, 1), np.delete(expected, 21, 1))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format_", ROUNDED)
def test_inputs_too_small_to_round_are_zero(variant: str, format_: str) -> None:
    matrix = packed_floats(weights(), format_)
    x = np.full((3, COLS), 1e-40, np.float32)
    for precise in (False, True):
        np.testing.assert_array_equal(apply(variant, matrix, x, precise=precise), 0.0)
