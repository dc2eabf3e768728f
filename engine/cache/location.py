"""Where the cache lies and how large it may grow, as the environment says."""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from pathlib import Path

from engine.cache.model_cache import ModelCache
from engine.config import ConfigError

DEFAULT_MAX_GIB = 64.0

_guard = threading.Lock()


def model_cache() -> ModelCache:
    """The cache of this process; what it was given stays in use until the process ends.

    Raises:
        ConfigError: SLIPSTREAM_CACHE_MAX_GIB is not a positive number.
    """
    with _guard:
        return _open(cache_folder(), max_cache_gib() * (1 << 30))


def cache_folder() -> Path:
    """Where fetched and converted models are kept: $SLIPSTREAM_CACHE or the user's cache."""
    if chosen := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(chosen)
    if user_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(user_cache) / "slipstream"
    return Path.home() / ".cache" / "slipstream"


def max_cache_gib() -> float:
    """$SLIPSTREAM_CACHE_MAX_GIB; ``inf`` is no bound.

    Raises:
        ConfigError: it is not a positive number.
    """
    chosen = os.environ.get("SLIPSTREAM_CACHE_MAX_GIB")
    if not chosen:
        return DEFAULT_MAX_GIB
    try:
        gib = float(chosen)
    except ValueError:
        gib = 0.0
    if not gib > 0:
        raise ConfigError(f"SLIPSTREAM_CACHE_MAX_GIB: must be a number above 0 (got {chosen!r})")
    return gib


# One at a time: with another folder, what was used of the last one is free again.
@lru_cache(maxsize=1)
def _open(root: Path, max_bytes: float) -> ModelCache:
    return ModelCache(root, max_bytes)
