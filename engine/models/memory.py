"""How much main memory is left."""

from __future__ import annotations

import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_ENTRY = re.compile(r"^(\w+): +(\d+) kB", re.MULTILINE)


class InsufficientMemoryError(MemoryError):
    """What is to be allocated exceeds what is free; both in bytes."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} bytes needed, {free} free")
        self.needed = needed
        self.free = free


def check_fits(num_bytes: int) -> None:
    """Raise `InsufficientMemoryError` rather than let the kernel kill the process later."""
    free = free_bytes()
    if free is not None and num_bytes > free:
        raise InsufficientMemoryError(num_bytes, free)


def read_meminfo(meminfo: Path = _MEMINFO) -> dict[str, int]:
    """What the system tells of its memory, in bytes by name; empty where it tells nothing."""
    text = meminfo.read_text(encoding="utf-8") if meminfo.is_file() else ""
    return {name: int(kib) << 10 for name, kib in _ENTRY.findall(text)}


def container_limit(cgroup: Path = _CGROUP) -> int | None:
    """Bytes that the container may use, by control groups, version 2; None: no limit."""
    limit = cgroup / "memory.max"
    text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else "max"
    return None if text == "max" else int(text)


def free_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Memory that can be had without swapping, in the container too; None: unknown."""
    limits = [limit for limit in (_of_machine(meminfo), _of_container(cgroup)) if limit is not None]
    return min(limits, default=None)


def _of_machine(meminfo: Path) -> int | None:
    return read_meminfo(meminfo).get("MemAvailable")


def _of_container(cgroup: Path) -> int | None:
    """By control groups, version 2; the page cache that a container holds can be had back."""
    current, stat = (cgroup / f"memory.{name}" for name in ("current", "stat"))
    maximum = container_limit(cgroup)
    if maximum is None or not current.is_file():
        return None
    cached = 0
    if stat.is_file():
        values = dict(line.split() for line in stat.read_text(encoding="utf-8").splitlines())
        cached = int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
    return max(0, maximum - int(current.read_text(encoding="utf-8")) + cached)
