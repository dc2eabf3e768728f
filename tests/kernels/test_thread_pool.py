"""The kernels' thread pool, driven from C++: no Python call makes its tasks fail at will."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = (HERE / "thread_pool_check.cpp", HERE.parents[1] / "engine/kernels/cpu/thread_pool.cpp")
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_exceptions_reach_the_caller_and_leave_no_task_behind(tmp_path: Path) -> None:
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O1", "-pthread", *shlex.split(os.environ.get("CXXFLAGS", ""))]
    # A sanitizer's runtime is preloaded for Python only: the program has its own.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(
        [str(COMPILER), *flags, *map(str, SOURCES), "-o", str(program)], check=True, env=environment
    )
    outcome = subprocess.run(
        [str(program)], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert (outcome.returncode, outcome.stderr) == (0, "")
