"""Makes one GGUF file of a model split into parts, for readers that take only one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from engine.models.gguf_header import TensorEntry, raw_metadata, read_header

_COPY_BYTES = 1 << 22


def merge(first: Path, target: Path, *, with_weights: bool) -> None:
    """Write one file with the metadata of the first part and the tensors of all.

    Args:
        with_weights: False: zeros in their place, which take no room on the disk.

    Raises:
        GgufError: some part is damaged or missing.
    """
    header = read_header(first)
    alignment = header.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    count, metadata = raw_metadata(first)
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
    name = tensor.name.encode()
    sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
    type_ = int(GGMLQuantizationType[tensor.element_type])
    return struct.pack("<Q", len(name)) + name + sizes + struct.pack("<IQ", type_, place)


def _copy(tensor: TensorEntry, file: BinaryIO) -> None:
    left = tensor.num_bytes
    with tensor.path.open("rb") as source:
        source.seek(tensor.offset)
        while left > 0:
            left -= file.write(source.read(min(left, _COPY_BYTES)))
