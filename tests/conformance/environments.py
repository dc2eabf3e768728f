"""Environments of the clients that tests drive: one each, apart from the server's own.

`python -m tests.conformance.environments [NAME...]` makes those that are missing or out of date.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

DRIVERS = Path(__file__).parent / "drivers"
ROOT = Path(__file__).parent.parent.parent
INSTALLED = ROOT / "build" / "clients"


class Environment(ABC):
    def __init__(self, name: str, pinned: Path) -> None:
        self.name = name
        self.pinned = pinned
        """The file that lists every package with its version."""
        self.folder = INSTALLED / name
        self._installed = self.folder / f"installed-{pinned.name}"

    def why_missing(self) -> str | None:
        """A reason to skip its tests, or None."""
        if self._installed.is_file() and self._installed.read_bytes() == self.pinned.read_bytes():
            return None
        return f"no {self.folder}: python -m tests.conformance.environments {self.name}"

    def install(self) -> None:
        if self.why_missing() is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self._install()
        shutil.copy(self.pinned, self._installed)

    @abstractmethod
    def _install(self) -> None:
        """Make the folder."""

    @abstractmethod
    def command(self, driver: str) -> Sequence[str]:
        """What runs a driver of this environment."""


class PythonEnvironment(Environment):
    def __init__(self, name: str) -> None:
        super().__init__(name, DRIVERS / "requirements" / f"{name}.txt")
        self._python = str(self.folder / "bin" / "python")

    def _install(self) -> None:
        venv.create(self.folder, with_pip=True)
        pip = [self._python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "--requirement", str(self.pinned)], check=True)

    def command(self, driver: str) -> Sequence[str]:
        return self._python, str(DRIVERS / driver)


class NodeEnvironment(Environment):
    def __init__(self, name: str) -> None:
        super().__init__(name, DRIVERS / "node" / "package-lock.json")

    def why_missing(self) -> str | None:
        missing = [program for program in ("node", "npm") if shutil.which(program) is None]
        return f"no {missing[0]}" if missing else super().why_missing()

    def install(self) -> None:
        if shutil.which("npm") is None:
            print(f"{self.name}: no npm", file=sys.stderr)
            return
        super().install()

    def _install(self) -> None:
        self.folder.mkdir(parents=True)
        for file in ("package.json", self.pinned.name):
            shutil.copy(self.pinned.with_name(file), self.folder)
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=self.folder, check=True)

    def command(self, driver: str) -> Sequence[str]:
        # A module finds its packages from where it lies.
        return "node", shutil.copy(self.pinned.with_name(driver), self.folder)


PYTHON_CLIENTS = tuple(file.stem for file in sorted((DRIVERS / "requirements").glob("*.txt")))
ENVIRONMENTS: dict[str, Environment] = {
    **{name: PythonEnvironment(name) for name in PYTHON_CLIENTS},
    "ai-sdk": NodeEnvironment("ai-sdk"),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or ENVIRONMENTS:
        ENVIRONMENTS[name].install()
