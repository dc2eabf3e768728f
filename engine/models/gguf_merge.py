"""Makes one GGUF file of a model split into parts, for readers that take only one."""

from __future__ import annotations

import struct
from collections.abc import Container, Mapping
from pathlib import Path
from typing import BinaryIO

from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from engine.models.gguf_header import TensorEntry, raw_metadata, read_header

_COPY_BYTES = 1 << 22


def merge(
    first: Path,
    target: Path,
    *,
    with_weights: bool,
    without: Container[str] = (),
    adding: Mapping[str, int] | None = None,
) -> None:
    """Write one file with the metadata of the first part and the tensors of all.

    Args:
        with_weights: False: zeros in their place, which take no room on the disk.
        without: keys of metadata to leave out.
        adding: metadata that is not there yet, numbers of 32 bits.

    Raises:
        GgufError: some part is damaged or missing.
    """
    header = read_header(first)
    alignment = header.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    count, metadata = raw_metadata(first, without)
    for key, value in (adding or {}).items():
        count += 1
        metadata += _string(key) + struct.pack("<II", GGUFValueType.UINT32, value)
    with target.open("xb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(header.tensors), count) + metadata)
        place = 0
        for tensor in header.tensors:
            file.write(_table_entry(tensor, place))
            place += -(-tensor.num_bytes // alignment) * alignment
        start = -(-file.tell() // alignment) * alignment
        file.truncate(start + place)
        if not with_weights:
            return
        for tensor in header.tensors:
            file.seek(start)
            _copy(tensor, file)
            start += -(-tensor.num_bytes // alignment) * alignment


def _table_entry(tensor: TensorEntry, place: int) -> bytes:
    sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
    type_ = int(GGMLQuantizationType[tensor.element_type])
    return _string(tensor.name) + sizes + struct.pack("<IQ", type_, place)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _copy(tensor: TensorEntry, file: BinaryIO) -> None:
    left = tensor.num_bytes
    with tensor.path.open("rb") as source:
        source.seek(tensor.offset)
        while left > 0:
            left -= file.write(source.read(min(left, _COPY_BYTES)))
