from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

class Format(IntEnum):
    F32 = ...
    F16 = ...
    BF16 = ...
    Q4_AFFINE = ...
    Q4_SYMMETRIC = ...
    Q4_SUPER = ...
    Q6_SUPER = ...
    Q8_SYMMETRIC = ...
    Q8_AFFINE = ...
    Q4_TABLE = ...
    Q4_TABLE_SUPER = ...

class KvType(Enum):
    F32 = ...
    BF16 = ...

class Activation(Enum):
    SILU = ...
    GELU_TANH = ...

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class PackedMatrix:
    def __init__(self, format: Format, rows: int, cols: int, data: Bytes) -> None: ...
    @property
    def format(self) -> Format: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def dequantize(self, first_row: int, out: Floats) -> None: ...

class Decoder:
    def __init__(
        self,
        pool: ThreadPool,
        variant: str,
        shape: Mapping[str, Any],
        weights: Mapping[str, PackedMatrix | Floats],
        layers: Sequence[Mapping[str, Any]],
        block_size: int,
        num_blocks: int,
        kv_type: KvType,
    ) -> None: ...
    def forward(
        self,
        token_ids: Int32Array,
        positions: Int32Array,
        slots: Int64Array,
        query_starts: Int32Array,
        context_lens: Int32Array,
        block_tables: Int32Array,
        logit_rows: Int32Array,
        logits: Floats,
    ) -> None: ...

def variants() -> list[str]: ...
def format_for_gguf(ggml_type: int) -> Format: ...
def gguf_row_bytes(ggml_type: int, cols: int) -> int: ...
def packed_bytes(format: Format, rows: int, cols: int) -> int: ...
def pack_gguf(
    pool: ThreadPool,
    ggml_type: int,
    source: Bytes,
    format: Format,
    rows: int,
    cols: int,
    rotary_heads: int,
    out: Bytes,
) -> None: ...
def pack_floats(
    pool: ThreadPool,
    source_format: Format,
    source: Bytes,
    format: Format,
    rows: int,
    cols: int,
    out: Bytes,
) -> None: ...
def linear(
    pool: ThreadPool,
    variant: str,
    matrix: PackedMatrix,
    x: Floats,
    out: Floats,
    precise: bool = False,
) -> None: ...
def time_linear(
    pool: ThreadPool, variant: str, matrices: Sequence[PackedMatrix], x: Floats, passes: int
) -> list[float]: ...
def likely_winners(
    variant: str,
    logits: Floats,
    lowest: Floats,
    score_to_beat: Floats,
    keys: Int64Array,
    noise_ids: Int64Array,
) -> tuple[Int64Array, Int64Array]: ...
def read_bytes(pool: ThreadPool, variant: str, data: Bytes) -> int: ...
def kv_block_bytes(
    shape: Mapping[str, Any], layers: int, block_size: int, kv_type: KvType
) -> int: ...
