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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from engine.cache.location import model_cache
from engine.cache.model_cache import cache_key
from engine.config import Quantization
from engine.kernels import load_native
from engine.models.decoder_spec import DecoderSpec
from engine.models.runner import UnsupportedModelError
from engine.models.source import ModelFiles
from engine.models.weight_files import Tensor, WeightFiles, open_weights
from engine.progress import reporting

if TYPE_CHECKING:
    from engine.kernels._native import Format, PackedMatrix, ThreadPool

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
_LARGE_HEAD = 1 << 26
"""Weights. Measured: 136 million lost no acceptance at 4 bits, 28 million a twelfth of it."""
_INT4_FORMATS: dict[Quantization, str] = {"int4": "Q4_AFFINE", "fast": "Q4_SYMMETRIC"}
_WIDER_THAN_INT4 = ("Q6_SUPER", "Q8_SYMMETRIC", "Q8_AFFINE")


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    format: str | None
    """Name of a `Format`; None: a vector of float32, a norm or bias."""
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
            self.format, self.rows, self.cols, self.data
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
            int8.

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
        json.dumps(asdict(spec.architecture.layout)),
        spec.heads,
        spec.kv_heads,
        contents.digest,
    )

    def make(folder: Path) -> None:
        started = time.monotonic()
        logger.info("packing the weights of %s for the CPU, once ...", files.name)
        weights = open_weights(files, spec.architecture)
        _write(folder / _FILE_NAME, weights, files.name, spec, quantization, threads)
        contents.require_unchanged()
        logger.info("packed %s in %.1f s", files.name, time.monotonic() - started)

    return _read(cache.folder("packed", f"{files.name}-{quantization}", key, make) / _FILE_NAME)


def _plan(tensors: Mapping[str, Tensor], quantization: Quantization) -> list[_Entry]:
    native = load_native()
    entries: list[_Entry] = []
    offset = 0
    for name, tensor in tensors.items():
        if len(tensor.shape) == 1:
            rows, cols, format_ = 1, tensor.shape[0], None
            size = 4 * cols
        elif len(tensor.shape) == 2:
            rows, cols = tensor.shape
            format_ = _matrix_format(name, tensor, quantization)
            size = native.packed_bytes(native.Format[format_], rows, cols)
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


def _matrix_format(name: str, tensor: Tensor, quantization: Quantization) -> str:
    """The name of the `Format` that a matrix is packed in."""
    rounds_head = quantization == "fast" and _is_large(tensor)
    keeps_bits = name == "embedding" or (name == "head" and not rounds_head)
    to_int4 = None if keeps_bits else _INT4_FORMATS.get(quantization)
    if (exact := _format_of_blocks(tensor)) is not None:
        return to_int4 if to_int4 and exact.name in _WIDER_THAN_INT4 else exact.name
    if quantization == "none":
        return tensor.element_type if tensor.is_float else "F32"
    return to_int4 or "Q8_SYMMETRIC"


def _format_of_blocks(tensor: Tensor) -> Format | None:
    """The format that holds a tensor's quantized blocks exactly, if there is one."""
    if tensor.is_float:
        return None
    try:
        exact: Format = load_native().format_for_gguf(GGMLQuantizationType[tensor.element_type])
    except ValueError:
        return None
    return exact


def _write(
    path: Path,
    weights: WeightFiles,
    name: str,
    spec: DecoderSpec,
    quantization: Quantization,
    threads: int,
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
        _fill(memory, data_start, entries, tensors, weights, name, spec, threads)


def _fill(
    memory: mmap.mmap,
    data_start: int,
    entries: Sequence[_Entry],
    tensors: Mapping[str, Tensor],
    weights: WeightFiles,
    name: str,
    spec: DecoderSpec,
    threads: int,
) -> None:
    native = load_native()
    pool = native.ThreadPool(threads)
    total = sum(entry.size for entry in entries)
    with reporting("packing", name, total, "bytes") as progress:
        for entry in entries:
            tensor = tensors[entry.name]
            out = np.frombuffer(memory, np.uint8, entry.size, data_start + entry.offset)
            heads = _rotary_heads(entry.name, spec) if weights.interleaved_rope else 0
            if entry.format is None:
                out.view(np.float32)[:] = _vector(entry.name, tensor, weights, heads)
            elif _format_of_blocks(tensor) is not None:
                type_, to = GGMLQuantizationType[tensor.element_type], native.Format[entry.format]
                native.pack_gguf(pool, type_, tensor.data, to, entry.rows, entry.cols, heads, out)
            else:
                _pack_floats(pool, tensor, entry, native.Format[entry.format], heads, out)
            del out
            progress.advance(entry.size)


def _pack_floats(
    pool: ThreadPool, tensor: Tensor, entry: _Entry, to: Format, heads: int, out: Bytes
) -> None:
    """Pack floats, and what has to become floats first, of which only a share is in memory."""
    native = load_native()

    def packed_size(rows: int) -> int:
        return native.packed_bytes(to, rows, entry.cols) if rows else 0

    step = entry.rows if heads or tensor.is_float else _ROWS_AT_ONCE
    for begin in range(0, entry.rows, step):
        end = min(begin + step, entry.rows)
        some = tensor.rows(begin, end)
        if not some.is_float:
            some = _unpacked(entry.name, some)
        data = _halves_together(some, heads) if heads else some.data
        share = out[packed_size(begin) : packed_size(end)]
        from_ = native.Format[some.element_type]
        native.pack_floats(pool, from_, data, to, end - begin, entry.cols, share)


def _unpacked(name: str, tensor: Tensor) -> Tensor:
    try:
        values = tensor.floats()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    return replace(tensor, data=values.reshape(-1).view(np.uint8), element_type="F32")


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
    if name.endswith("norm") and weights.norm_offset:
        return values + np.float32(weights.norm_offset)
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
        content = data[begin : begin + entry.size]
        if entry.format is None:
            vectors[entry.name] = content.view(np.float32)
        else:
            format_ = load_native().Format[entry.format]
            matrices[entry.name] = PackedMatrixData(format_, entry.rows, entry.cols, content)
    return PackedWeights(matrices, vectors)
