"""How much main memory is left."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


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


def free_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Memory that can be had without swapping, in the container too; None: unknown."""
    limits = [limit for limit in (_of_machine(meminfo), _of_container(cgroup)) if limit is not None]
    return min(limits, default=None)


def _of_machine(meminfo: Path) -> int | None:
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None


def _of_container(cgroup: Path) -> int | None:
    """By control groups, version 2; the page cache that a container holds can be had back."""
    limit, current, stat = (cgroup / f"memory.{name}" for name in ("max", "current", "stat"))
    if not limit.is_file() or not current.is_file():
        return None
    maximum = limit.read_text(encoding="utf-8").strip()
    if maximum == "max":
        return None
    cached = 0
    if stat.is_file():
        values = dict(line.split() for line in stat.read_text(encoding="utf-8").splitlines())
        cached = int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
    return max(0, int(maximum) - int(current.read_text(encoding="utf-8")) + cached)
