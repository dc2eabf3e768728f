"""The image's steps, carried out in a Debian root; the result runs as a container would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def missing(folder: Path) -> str | None:
    """What keeps this machine from building; None: nothing."""
    if os.geteuid() != 0:
        return "needs root"
    for program in ("mmdebstrap", "unshare", "nsenter", "setpriv", "ip"):
        if shutil.which(program) is None:
            return f"needs {program}"
    for name in ("lower", "upper", "work", "at"):
        (folder / name).mkdir()
    options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(folder / "at")]
    tried = subprocess.run(["unshare", "--mount", "--pid", "--net", "--fork", *mount], check=False)
    return None if tried.returncode == 0 else "may not mount overlays"


def test_the_image_starts_and_its_health_check_sees_loading_ready_and_dead(tmp_path: Path) -> None:
    if (reason := missing(tmp_path)) is not None:
        pytest.skip(reason)
    tried = subprocess.run(
        [sys.executable, "-m", "deploy.image"], cwd=ROOT, capture_output=True, text=True
    )
    print(tried.stdout, tried.stderr)
    assert tried.returncode == 0
    for state in ("loading: ", "ready: ", "dead: "):
        assert state in tried.stdout
