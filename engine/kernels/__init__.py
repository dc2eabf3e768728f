"""Native CPU kernels, and whether this installation has them."""

from __future__ import annotations

import importlib
from types import ModuleType


def native_available() -> str | None:
    """None when the native extension can be used, else the reason why not."""
    try:
        load_native()
    except ImportError as error:
        return f"the native CPU kernels are not part of this installation ({error})"
    return None


def load_native() -> ModuleType:
    """The compiled extension.

    Raises:
        ImportError: it was not built (no compiler at install time) or does not load.
    """
    return importlib.import_module("engine.kernels._native")
