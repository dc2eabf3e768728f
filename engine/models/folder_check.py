"""Finds damaged model folders before anything is loaded from them."""

from __future__ import annotations

import json
from pathlib import Path

from engine.models.safetensors_header import read_safetensors_header
from engine.models.source import ModelSourceError


def check_folder(folder: Path) -> None:
    """Require a usable config.json and safetensors files that are neither cut short nor damaged.

    Raises:
        ModelSourceError: one line that names the file.
    """
    _check_config(folder / "config.json")
    for path in sorted(folder.glob("*.safetensors")):
        read_safetensors_header(path)


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
