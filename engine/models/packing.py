"""Packed weights: made once from a model's files, kept in the cache, mapped at the next start.

A packed file is a JSON header (see `_Entry`) and the tensors, each at a multiple of 4096 bytes.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.cache.location import model_cache
from engine.cache.model_cache import cache_key
from engine.config import Quantization
from engine.kernels import load_native
from engine.models.decoder_spec import DecoderSpec
from engine.models.runner import UnsupportedModelError
from engine.models.source import ModelFiles
from engine.models.weight_files import FloatType, Tensor, WeightFiles, open_weights

if TYPE_CHECKING:
    from engine.kernels._native import PackedMatrix, ThreadPool

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_VERSION = 4
"""Raised whenever the layout of packed bytes changes."""
_MAGIC = b"SLIPPACK"
_ALIGNMENT = 4096
_ROWS_AT_ONCE = 8192
"""Unpacked to float32 at the same time; whole tiles."""
_FILE_NAME = "weights.slip"
_VECTOR = -1
_LARGE_HEAD = 1 << 26
"""Weights. Measured: 136 million lost no acceptance at 4 bits, 28 million a twelfth of it."""


class Format(IntEnum):
    """Packed formats, numbered as the native extension does."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q4_AFFINE = 3
    Q4_SYMMETRIC = 4
    Q4_SUPER = 5
    Q6_SUPER = 6
    Q8_SYMMETRIC = 7
    Q8_AFFINE = 8
    Q4_TABLE = 9
    Q4_TABLE_SUPER = 10


_INT4_FORMATS: dict[Quantization, Format] = {
    "int4": Format.Q4_AFFINE,
    "fast": Format.Q4_SYMMETRIC,
}
_WIDER_THAN_INT4 = (Format.Q6_SUPER, Format.Q8_SYMMETRIC, Format.Q8_AFFINE)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    format: int
    """A `Format`, or `_VECTOR` for float32 norms and biases."""
    rows: int
    cols: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class PackedMatrixData:
    format: Format
    rows: int
    cols: int
    data: Bytes

    def native(self) -> PackedMatrix:
        """The matrix as the extension takes it."""
        matrix: PackedMatrix = load_native().PackedMatrix(
            int(self.format), self.rows, self.cols, self.data
        )
        return matrix


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A model's weights in the native layout, mapped from a packed file."""

    matrices: Mapping[str, PackedMatrixData]
    vectors: Mapping[str, Floats]

    def native_matrices(self) -> list[tuple[str, PackedMatrix]]:
        """Every matrix for the extension, with its format's name (for `bench_kernels`)."""
        return [(m.format.name.lower(), m.native()) for m in self.matrices.values()]

    @property
    def num_parameters(self) -> int:
        matrices = sum(m.rows * m.cols for m in self.matrices.values())
        return matrices + sum(v.size for v in self.vectors.values())

    @property
    def num_bytes(self) -> int:
        matrices = sum(m.data.nbytes for m in self.matrices.values())
        return matrices + sum(v.nbytes for v in self.vectors.values())

    @property
    def main_format(self) -> Format:
        """The format of most weights."""
        sizes: dict[Format, int] = {}
        for matrix in self.matrices.values():
            sizes[matrix.format] = sizes.get(matrix.format, 0) + matrix.rows * matrix.cols
        return max(sizes, key=lambda format_: sizes[format_])


def packed_weights(
    files: ModelFiles, spec: DecoderSpec, quantization: Quantization, threads: int
) -> PackedWeights:
    """The packed weights of a model, from the cache if they are there.

    Args:
        quantization: what wider weights are rounded to, in groups of 32: int8 or int4 (embedding
            and head stay at int8), fast (the smallest int4, a large head too); `none` keeps all
            weights as the file has them, `auto` what is quantized there, and rounds the rest to
            int8. Blocks of a GGUF type that no `Format` holds count as float32 weights.

    Raises:
        UnsupportedModelError: the native decoder can't hold some tensor; names it.
        ModelSourceError: a file is damaged.
        CacheError: the cache can't be written, or a file changes meanwhile.
    """
    cache = model_cache()
    contents = cache.contents(files.weight_files)
    key = cache_key(
        "packed",
        _VERSION,
        quantization,
        _LARGE_HEAD,
        spec.is_gemma,
        spec.heads,
        spec.kv_heads,
        contents.digest,
    )

    def make(folder: Path) -> None:
        started = time.monotonic()
        logger.info("packing the weights of %s for the CPU, once ...", files.name)
        weights = open_weights(files, is_gemma=spec.is_gemma)
        _write(folder / _FILE_NAME, weights, spec, quantization, threads)
        contents.require_unchanged()
        logger.info("packed %s in %.1f s", files.name, time.monotonic() - started)

    return _read(cache.folder("packed", f"{files.name}-{quantization}", key, make) / _FILE_NAME)


def _plan(tensors: Mapping[str, Tensor], quantization: Quantization) -> list[_Entry]:
    native = load_native()
    entries: list[_Entry] = []
    offset = 0
    for name, tensor in tensors.items():
        if len(tensor.shape) == 1:
            rows, cols, format_ = 1, tensor.shape[0], _VECTOR
            size = 4 * cols
        elif len(tensor.shape) == 2:
            rows, cols = tensor.shape
            format_ = _matrix_format(name, tensor, quantization)
            size = native.packed_bytes(format_, rows, cols)
        else:
            raise UnsupportedModelError(f"{name} has {len(tensor.shape)} dimensions")
        entries.append(_Entry(name, format_, rows, cols, offset, size))
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    if not entries:
        raise UnsupportedModelError("the model has no weights")
    return entries


def _tensors(weights: WeightFiles, quantization: Quantization) -> Mapping[str, Tensor]:
    """Those of the files, and a head of its own where a tied one is rounded more."""
    tensors = weights.tensors
    tied = "head" not in tensors and "embedding" in tensors
    if tied and quantization == "fast" and _is_large(tensors["embedding"]):
        return {**tensors, "head": tensors["embedding"]}
    return tensors


def _is_large(head: Tensor) -> bool:
    """Whether a draft wins more by a quick head than it loses: the larger, the less it loses."""
    return math.prod(head.shape) >= _LARGE_HEAD


def _matrix_format(name: str, tensor: Tensor, quantization: Quantization) -> Format:
    rounds_head = quantization == "fast" and _is_large(tensor)
    keeps_bits = name == "embedding" or (name == "head" and not rounds_head)
    to_int4 = None if keeps_bits else _INT4_FORMATS.get(quantization)
    if (exact := _format_of_blocks(tensor)) is not None:
        return to_int4 if to_int4 and exact in _WIDER_THAN_INT4 else exact
    if quantization == "none":
        return Format(int(tensor.float_type or FloatType.F32))
    return to_int4 or Format.Q8_SYMMETRIC


def _format_of_blocks(tensor: Tensor) -> Format | None:
    """The format that holds a tensor's quantized blocks exactly, if there is one."""
    if tensor.float_type is not None:
        return None
    try:
        return Format(load_native().format_for_gguf(tensor.ggml_type))
    except ValueError:
        return None


def _write(
    path: Path, weights: WeightFiles, spec: DecoderSpec, quantization: Quantization, threads: int
) -> None:
    tensors = _tensors(weights, quantization)
    entries = _plan(tensors, quantization)
    header = json.dumps([asdict(entry) for entry in entries]).encode()
    data_start = -(-(len(_MAGIC) + 8 + len(header)) // _ALIGNMENT) * _ALIGNMENT
    size = data_start + entries[-1].offset + entries[-1].size
    with path.open("x+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        # Not closed: arrays in an exception's frames would turn it into one about the map.
        memory = mmap.mmap(file.fileno(), size)
        memory[: len(_MAGIC)] = _MAGIC
        memory[len(_MAGIC) : len(_MAGIC) + 8] = len(header).to_bytes(8, "little")
        memory[len(_MAGIC) + 8 : len(_MAGIC) + 8 + len(header)] = header
        _fill(memory, data_start, entries, tensors, weights, spec, threads)


def _fill(
    memory: mmap.mmap,
    data_start: int,
    entries: Iterable[_Entry],
    tensors: Mapping[str, Tensor],
    weights: WeightFiles,
    spec: DecoderSpec,
    threads: int,
) -> None:
    native = load_native()
    pool = native.ThreadPool(threads)
    for entry in entries:
        tensor = tensors[entry.name]
        out = np.frombuffer(memory, np.uint8, entry.size, data_start + entry.offset)
        heads = _rotary_heads(entry.name, spec) if weights.interleaved_rope else 0
        if entry.format == _VECTOR:
            out.view(np.float32)[:] = _vector(entry.name, tensor, weights, heads)
        elif tensor.ggml_type is not None and (
            _format_of_blocks(tensor) or entry.format == tensor.float_type
        ):
            native.pack_gguf(
                pool,
                tensor.ggml_type,
                tensor.data,
                entry.format,
                entry.rows,
                entry.cols,
                heads,
                out,
            )
        else:
            _pack_floats(pool, tensor, entry, heads, out)
        del out


def _pack_floats(pool: ThreadPool, tensor: Tensor, entry: _Entry, heads: int, out: Bytes) -> None:
    """Pack floats, and what has to become floats first, of which only a share is in memory."""
    native = load_native()

    def packed_size(rows: int) -> int:
        return native.packed_bytes(entry.format, rows, entry.cols) if rows else 0

    step = entry.rows if heads or tensor.float_type is not None else _ROWS_AT_ONCE
    for begin in range(0, entry.rows, step):
        end = min(begin + step, entry.rows)
        some = tensor.rows(begin, end)
        if some.float_type is None:
            some = _unpacked(entry.name, some)
        data = _halves_together(some, heads) if heads else some.data
        native.pack_floats(
            pool,
            int(some.float_type or 0),
            data,
            entry.format,
            end - begin,
            entry.cols,
            out[packed_size(begin) : packed_size(end)],
        )


def _unpacked(name: str, tensor: Tensor) -> Tensor:
    try:
        values = tensor.floats()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    return replace(tensor, data=values.reshape(-1).view(np.uint8), float_type=FloatType.F32)


def _rotary_heads(name: str, spec: DecoderSpec) -> int:
    part = name.partition(".")[2].removesuffix("_bias")
    return {"q": spec.heads, "k": spec.kv_heads}.get(part, 0)


def _halves_together(tensor: Tensor, heads: int) -> Bytes:
    """Rows of each head from RoPE pairs side by side to first and second halves."""
    row_bytes = tensor.data.size // tensor.shape[0]
    rows = tensor.data.reshape(heads, -1, 2, row_bytes)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def _vector(name: str, tensor: Tensor, weights: WeightFiles, heads: int) -> Floats:
    values = tensor.floats()
    if name.endswith("norm") and weights.norms_lack_one:
        return values + np.float32(1.0)
    if heads:
        return values.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return values


def _read(path: Path) -> PackedWeights:
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(memory, np.uint8)
    header_size = int.from_bytes(memory[len(_MAGIC) : len(_MAGIC) + 8], "little")
    header_end = len(_MAGIC) + 8 + header_size
    entries = [_Entry(**entry) for entry in json.loads(memory[len(_MAGIC) + 8 : header_end])]
    data_start = -(-header_end // _ALIGNMENT) * _ALIGNMENT
    matrices, vectors = {}, {}
    for entry in entries:
        begin = data_start + entry.offset
        piece = data[begin : begin + entry.size]
        if entry.format == _VECTOR:
            vectors[entry.name] = piece.view(np.float32)
        else:
            matrices[entry.name] = PackedMatrixData(
                Format(entry.format), entry.rows, entry.cols, piece
            )
    return PackedWeights(matrices, vectors)
