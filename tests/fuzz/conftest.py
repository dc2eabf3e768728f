"""The long form of each fuzz test runs only when asked for: by `-m slow`, or by its length."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.option.markexpr or "FUZZ_INPUTS" in os.environ:
        return
    long = [
        item for item in items if FOLDER in item.path.parents and item.get_closest_marker("slow")
    ]
    items[:] = [item for item in items if item not in long]
    config.hook.pytest_deselected(items=long)
