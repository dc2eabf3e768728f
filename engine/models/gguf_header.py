"""Reads what stands in front of a GGUF file's weights: metadata and the table of tensors.

The `gguf` package's own reader takes 3 to 16 s for real vocabularies, because it makes
an array of every string; this one takes a tenth of a second, so it can run at every start.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALAR_FORMATS: Mapping[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Of one of the files that a large model is split into."""


class GgufError(ValueError):
    """The file is no readable GGUF; the message is one line that names it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in the file, and how it is packed."""

    name: str
    element_type: str
    """ggml's or safetensors' name of it: ``F32``, ``Q4_K``, ..."""
    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it (a GGUF stores it the other way round)."""
    path: Path
    """The file it lies in."""
    offset: int
    """Bytes from the start of that file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Mapping[str, Any]
    """Values under llama.cpp's key names: bool, int, float, str, or lists of them."""
    tensors: tuple[TensorEntry, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def of_architecture(self, key: str) -> Any:
        """The value of ``<architecture>.<key>``, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def has_tensor(self, name: str) -> bool:
        return any(tensor.name == name for tensor in self.tensors)


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Every file of the model that `path` is a part of, in order; by their names alone."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        return (path,)
    names = (f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))
    return tuple(path.with_name(name) for name in names)


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table, and check that all weights are there.

    Args:
        path: the file, or the first one of a model split into parts.

    Raises:
        GgufError: not a GGUF, a version this reader doesn't know, damaged, cut short, or one of
            several parts without the others.
    """
    header = _read_file(path)
    paths = gguf_parts(path)
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int):
        raise GgufError(f"{path}: damaged GGUF header (split.count is {type(count).__name__})")
    if len(paths) != max(1, count) or path != paths[0]:
        raise GgufError(
            f"{path}: one of {count} parts by its metadata, one of {len(paths)} by its name; the "
            f"first of several must be named NAME-00001-of-{max(1, count):05}.gguf"
        )
    if count <= 1:
        return header
    for number, part in enumerate(paths, 1):
        if not part.is_file():
            raise GgufError(f"{path}: part {number} of {count} is missing: {part.name}")
    headers = [header, *(_read_file(part) for part in paths[1:])]
    for number, (part, its_header) in enumerate(zip(paths, headers, strict=True)):
        place = its_header.metadata.get("split.no"), its_header.metadata.get("split.count")
        if place != (number, count):
            raise GgufError(f"{part}: its metadata do not make it part {number + 1} of {count}")
    return GgufHeader(header.metadata, _joined(path, headers))


def _joined(path: Path, headers: Sequence[GgufHeader]) -> tuple[TensorEntry, ...]:
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    expected = headers[0].metadata.get("split.tensors.count", len(tensors))
    if len({tensor.name for tensor in tensors}) != len(tensors) or len(tensors) != expected:
        raise GgufError(f"{path}: its parts do not belong together: {expected} tensors expected")
    return tensors


def raw_metadata(path: Path, without: Container[str] = ()) -> tuple[int, bytes]:
    """Number of values and their bytes in a file that `read_header` accepts.

    Args:
        without: keys of values to leave out.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        _, _, count = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
        kept = []
        for _ in range(count):
            start = cursor.position
            key = cursor.string()
            cursor.value(cursor.scalar("I"))
            if key not in without:
                kept.append(data[start : cursor.position])
        return len(kept), b"".join(kept)


def _read_file(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise GgufError(f"{path}: not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise GgufError(f"{path}: {error.strerror}") from error
    except (struct.error, EOFError) as error:
        raise GgufError(f"{path}: the GGUF file is cut short in its header") from error
    except GgufError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise GgufError(f"{path}: damaged GGUF header ({detail})") from error


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = len(_MAGIC)

    def scalar(self, format_: str) -> Any:
        return self.scalars(format_, 1)[0]

    def scalars(self, format_: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{format_}") * count
        self._require(size)
        values = struct.unpack_from(f"<{count}{format_}", self._data, self.position)
        self.position += size
        return values

    def string(self) -> str:
        size = self.scalar("Q")
        self._require(size)
        end = self.position + size
        text = self._data[self.position : end].decode("utf-8")
        self.position = end
        return text

    def value(self, type_: int) -> Any:
        if type_ == GGUFValueType.STRING:
            return self.string()
        if type_ != GGUFValueType.ARRAY:
            return self.scalar(_SCALAR_FORMATS[type_])
        item_type, count = self.scalar("I"), self.scalar("Q")
        if item_type in _SCALAR_FORMATS:
            return list(self.scalars(_SCALAR_FORMATS[item_type], count))
        read: Callable[[], Any] = (
            self.string if item_type == GGUFValueType.STRING else lambda: self.value(item_type)
        )
        return [read() for _ in range(count)]

    def _require(self, size: int) -> None:
        if self.position + size > len(self._data):
            raise EOFError


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data)
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise GgufError(f"{path}: GGUF version {version}; versions 2 and 3 can be read")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    is_later_part = metadata.get("split.no", 0) > 0
    if not isinstance(metadata.get("general.architecture"), str) and not is_later_part:
        raise GgufError(f"{path}: damaged GGUF header (no general.architecture)")
    table = [_read_tensor_entry(path, cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    weights_start = -(-cursor.position // alignment) * alignment
    tensors = tuple(
        TensorEntry(
            name, type_.name, shape, path, weights_start + offset, _packed_bytes(name, type_, shape)
        )
        for name, type_, shape, offset in table
    )
    weights_end = max((tensor.offset + tensor.num_bytes for tensor in tensors), default=0)
    if weights_end > len(data):
        raise GgufError(
            f"{path}: the GGUF file is cut short: {len(data)} bytes of {weights_end} are there"
        )
    return GgufHeader(metadata, tensors)


def _read_tensor_entry(
    path: Path, cursor: _Cursor
) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    innermost_first = cursor.scalars("Q", num_dimensions)
    number = cursor.scalar("I")
    if number not in GGML_QUANT_SIZES:
        raise GgufError(f"{path}: the tensor {name} is of a type that is not known, {number}")
    return name, GGMLQuantizationType(number), innermost_first[::-1], cursor.scalar("Q")


def _packed_bytes(name: str, type_: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    block_size: int
    block_bytes: int
    block_size, block_bytes = GGML_QUANT_SIZES[type_]
    if shape and shape[-1] % block_size:
        raise ValueError(f"{name} has rows of {shape[-1]} values in blocks of {block_size}")
    return math.prod(shape) // block_size * block_bytes
