"""A model folder's generation_config.json: end tokens and sampling defaults."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.request import NO_ADVICE, SamplingDefaults

logger = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"

_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    eos_ids: tuple[int, ...] = ()
    sampling: SamplingDefaults = NO_ADVICE


def read_generation_config(folder: Path) -> GenerationConfig:
    """Empty when the folder has no such file; values out of range are left out, with a warning.

    Raises:
        ValueError: the file is not JSON.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return GenerationConfig()
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    eos = values.get("eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    known = {name: _number(path, name, values.get(name)) for name in _RANGES}
    top_k = known.pop("top_k")
    sampling = SamplingDefaults(top_k=None if top_k is None else max(0, int(top_k)), **known)
    return GenerationConfig(eos_ids, sampling)


def _number(path: Path, name: str, value: Any) -> float | None:
    if value is None:
        return None
    least, most = _RANGES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and least <= value <= most:
        return float(value)
    logger.warning("%s: %s is %r, not from %g to %g; left out", path, name, value, least, most)
    return None
