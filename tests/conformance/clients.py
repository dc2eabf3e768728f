"""Clients no one here wrote, each run as a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}


HOW_TO_INSTALL = "pip install -e '.[conformance]'"


def needs_client(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"no {package}: {HOW_TO_INSTALL}",
    )


def run_client(
    module: str,
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments`; what it printed is shown where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env={**os.environ, **OFFLINE, "OPENAI_API_KEY": "none", **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done
