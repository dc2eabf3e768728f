"""Reads the table of tensors in front of a safetensors file's weights.

The `safetensors` package has its own reader, but that does not tell where a tensor lies, and says
of a damaged file neither its name nor how much of it is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.models.gguf_header import TensorEntry
from engine.models.source import ModelSourceError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20
"""What the format allows."""


def read_safetensors_header(path: Path) -> tuple[TensorEntry, ...]:
    """Read the table of tensors, and check that the file holds all of their bytes.

    Raises:
        ModelSourceError: not a safetensors file, damaged, or cut short; one line that names it.
    """
    try:
        with path.open("rb") as file:
            num_header = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if num_header > _MAX_HEADER_BYTES:
                raise ModelSourceError(f"{path}: not a safetensors file")
            header = file.read(num_header)
        size = path.stat().st_size
    except OSError as error:
        raise ModelSourceError(f"{path}: {error.strerror}") from error
    data_start = _LENGTH_BYTES + num_header
    if size < data_start or not num_header:
        raise ModelSourceError(f"{path}: cut short in its header")
    try:
        table: dict[str, Any] = json.loads(header)
        entries = tuple(
            _entry(path, name, values, data_start)
            for name, values in table.items()
            if name != "__metadata__"
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelSourceError(f"{path}: damaged safetensors header") from error
    needed = max((entry.offset + entry.num_bytes for entry in entries), default=data_start)
    if size < needed:
        raise ModelSourceError(f"{path}: cut short: {size} of {needed} bytes are there")
    return entries


def _entry(path: Path, name: str, values: dict[str, Any], data_start: int) -> TensorEntry:
    begin, end = map(int, values["data_offsets"])
    if not 0 <= begin <= end:
        raise ValueError(f"{name} lies nowhere")
    shape = tuple(int(length) for length in values["shape"])
    return TensorEntry(name, str(values["dtype"]), shape, path, data_start + begin, end - begin)
