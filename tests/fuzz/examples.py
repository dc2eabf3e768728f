"""How many inputs a fuzz test tries: a few in every run, many in the long form.

`FUZZ_INPUTS=5000 pytest tests/fuzz -m slow` gives the long form another length; every run of it
tries other inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy


def short_and_long(quick: int, long: int) -> pytest.MarkDecorator:
    """Run a test with `num_examples` of `quick` and, marked slow, of `long`."""
    long = int(os.environ.get("FUZZ_INPUTS", long))
    marks = [pytest.mark.slow, pytest.mark.timeout(3600)]
    return pytest.mark.parametrize(
        "num_examples",
        [
            pytest.param(quick, id=f"{quick}-inputs"),
            pytest.param(long, id=f"{long}-inputs", marks=marks),
        ],
    )


def fuzzed(
    *, quick: int, long: int, **strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Turn a check of one input into a test of `quick` inputs and one, marked slow, of `long`."""

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        @short_and_long(quick, long)
        def test(num_examples: int) -> None:
            options = settings(
                max_examples=num_examples,
                deadline=None,
                database=None,
                derandomize=num_examples == quick,
                suppress_health_check=list(HealthCheck),
            )
            options(given(**strategies)(check))()

        return test

    return decorate
