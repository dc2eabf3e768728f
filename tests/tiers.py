"""What `make test` leaves to `make test-all`, where that is not a whole file.

Promise 1 is compared under every way of drafting; `auto`, the default, is enough for the short run.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def slow_unless_auto(draftings: Iterable[str]) -> list[ParameterSet]:
    return [
        pytest.param(drafting, marks=[] if drafting == "auto" else [pytest.mark.slow])
        for drafting in draftings
    ]
