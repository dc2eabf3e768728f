from __future__ import annotations

import pytest

from engine.kernels import native_available


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (reason := native_available()) is not None:
        for item in items:
            if "tests/kernels/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))
