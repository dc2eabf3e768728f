"""A pytest plugin: the extension under $SLIPSTREAM_NATIVE takes the place of the installed one.

`make sanitize` tests a build with sanitizers by it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_NAME = "engine.kernels._native"


def _load(folder: Path) -> None:
    (path,) = (folder / "engine" / "kernels").glob("_native.*.so")
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)


_load(Path(os.environ["SLIPSTREAM_NATIVE"]))
