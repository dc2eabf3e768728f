"""Finds damaged model folders before anything is loaded from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.models.source import ModelSourceError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20
"""What the safetensors format allows."""


def check_folder(folder: Path) -> None:
    """Require a usable config.json and safetensors files that are neither cut short nor damaged.

    Raises:
        ModelSourceError: one line that names the file.
    """
    _check_config(folder / "config.json")
    for path in sorted(folder.glob("*.safetensors")):
        _check_safetensors(path)


def _check_config(path: Path) -> None:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelSourceError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelSourceError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelSourceError(f"{path}: not a model's configuration: it has no model_type")
    if "auto_map" in config and not _is_known(config["model_type"]):
        raise ModelSourceError(
            f"{path}: a model of type {config['model_type'][:64]!r} needs code of its own, which "
            "is never run"
        )


def _is_known(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING  # takes seconds, and is seldom needed

    return model_type in CONFIG_MAPPING


def _check_safetensors(path: Path) -> None:
    try:
        with path.open("rb") as file:
            num_header = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if num_header > _MAX_HEADER_BYTES:
                raise ModelSourceError(f"{path}: not a safetensors file")
            header = file.read(num_header)
        size = path.stat().st_size
    except OSError as error:
        raise ModelSourceError(f"{path}: {error.strerror}") from error
    if size < _LENGTH_BYTES + num_header or not num_header:
        raise ModelSourceError(f"{path}: cut short in its header")
    needed = _LENGTH_BYTES + num_header + _data_bytes(path, header)
    if size < needed:
        raise ModelSourceError(f"{path}: cut short: {size} of {needed} bytes are there")


def _data_bytes(path: Path, header: bytes) -> int:
    try:
        entries: dict[str, Any] = json.loads(header)
        ends = [
            int(entry["data_offsets"][1])
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelSourceError(f"{path}: damaged safetensors header") from error
    return max(ends, default=0)
