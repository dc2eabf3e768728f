"""Random GGUF blocks and aligned buffers for kernel tests."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.kernels import load_native

QUANTIZED = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"
)  # fmt: skip
SCALE_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def aligned(size: int) -> npt.NDArray[np.uint8]:
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def random_blocks(quantization: str, rows: int, cols: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """uint8[rows, row bytes]: every quant and small scale random, float16 scales of either sign."""
    rng = np.random.default_rng(seed)
    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[quantization]]
    blocks = rng.integers(0, 256, (rows * cols // columns, size), dtype=np.uint8)
    for offset in SCALE_OFFSETS[quantization]:
        scales = rng.uniform(-0.02, 0.02, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def dequantized(quantization: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return gguf.dequantize(blocks, GGMLQuantizationType[quantization])


def packed(
    quantization: str,
    blocks: npt.NDArray[np.uint8],
    cols: int,
    rotary_heads: int = 0,
    format_: str | None = None,
) -> Any:
    """A PackedMatrix of GGUF blocks, by default in the format that holds them exactly."""
    native = load_native()
    ggml_type = int(GGMLQuantizationType[quantization])
    to = native.format_for_gguf(ggml_type) if format_ is None else native.Format[format_]
    out = aligned(native.packed_bytes(to, len(blocks), cols))
    pool = native.ThreadPool(2)
    source = blocks.reshape(-1)
    native.pack_gguf(pool, ggml_type, source, to, len(blocks), cols, rotary_heads, out)
    return native.PackedMatrix(to, len(blocks), cols, out)


def packed_floats(weights: npt.NDArray[np.float32], format_: str) -> Any:
    """A PackedMatrix of float32 weights rounded to int8 or int4, or kept."""
    native = load_native()
    rows, cols = weights.shape
    from_, to = native.Format.F32, native.Format[format_]
    out = aligned(native.packed_bytes(to, rows, cols))
    source = weights.view(np.uint8).reshape(-1)
    native.pack_floats(native.ThreadPool(1), from_, source, to, rows, cols, out)
    return native.PackedMatrix(to, rows, cols, out)


def unpacked(matrix: Any) -> npt.NDArray[np.float32]:
    out = np.empty((matrix.rows, matrix.cols), np.float32)
    matrix.dequantize(0, out)
    return out
