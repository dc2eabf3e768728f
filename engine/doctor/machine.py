"""What this machine has to offer: cores, instructions, memory and how fast it is read, disk."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.cache.location import cache_folder
from engine.kernels import load_native, native_available
from engine.models.memory import container_limit, free_bytes, read_meminfo

_FEATURES = {
    "AVX2": {"avx2", "fma", "f16c"},
    "AVX-512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "AVX-512 VNNI": {"avx512_vnni"},
    "AVX-512 BF16": {"avx512_bf16"},
    "AMX int8": {"amx_tile", "amx_int8"},
    "NEON dot product": {"asimd", "asimddp"},
}
"""Names of instruction sets, and the kernel's flags that all have to be there."""
_LIBRARIES = ("slipstream", "torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts; None is what the system does not tell."""

    cpu: str
    logical_cores: int
    usable_cores: int
    """Logical ones that this process may use (its affinity)."""
    usable_physical_cores: int | None
    cgroup_cores: float | None
    """CPU time the container may use, in cores; None: no limit."""
    threads: int
    """That a server would use, as configured."""
    features: tuple[str, ...]
    """Instruction sets that matter here."""
    kernels: str | None
    """The native variant that would be used; None: there is none."""
    kernels_missing: str | None
    """Why there are no native kernels."""
    read_gb_per_s: dict[int, float]
    """Measured, in 1e9 bytes a second by number of threads; empty without native kernels."""
    memory_bytes: int | None
    free_memory_bytes: int | None
    cgroup_memory_bytes: int | None
    """None: no limit."""
    swap_bytes: int | None
    swap_used_bytes: int | None
    huge_pages: str | None
    """Mode of transparent huge pages: always, madvise or never."""
    gpus: tuple[Gpu, ...]
    cache: Path
    cache_writable: bool
    cache_free_bytes: int
    versions: dict[str, str]


def examine_machine(
    threads: int | None,
    on_progress: Callable[[str], None],
    *,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
) -> Machine:
    """Look at everything; measuring the memory takes some seconds.

    Args:
        threads: as configured; None: the cores.
        on_progress: told what is looked at.
    """
    usable = sorted(os.sched_getaffinity(0))
    threads = threads or len(usable)
    on_progress("the system")
    meminfo = read_meminfo(proc / "meminfo")
    cpuinfo = _text(proc / "cpuinfo") or ""
    missing = native_available()
    on_progress("the memory's bandwidth")
    bandwidth = {} if missing else _bandwidths({1, threads})
    on_progress("PyTorch and GPUs")
    gpus = tuple(_gpus())
    cache = cache_folder()
    there = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    return Machine(
        cpu=_field(cpuinfo, "model name") or platform.processor() or platform.machine(),
        logical_cores=os.cpu_count() or len(usable),
        usable_cores=len(usable),
        usable_physical_cores=_physical_cores(usable, sys),
        cgroup_cores=_cgroup_cores(sys),
        threads=threads,
        features=_features(cpuinfo),
        kernels=None if missing else load_native().variants()[0],
        kernels_missing=missing,
        read_gb_per_s=bandwidth,
        memory_bytes=meminfo.get("MemTotal"),
        free_memory_bytes=free_bytes(proc / "meminfo", sys / "fs" / "cgroup"),
        cgroup_memory_bytes=container_limit(sys / "fs" / "cgroup"),
        swap_bytes=meminfo.get("SwapTotal"),
        swap_used_bytes=_difference(meminfo, "SwapTotal", "SwapFree"),
        huge_pages=_chosen(_text(sys / "kernel" / "mm" / "transparent_hugepage" / "enabled")),
        gpus=gpus,
        cache=cache,
        cache_writable=os.access(there, os.W_OK | os.X_OK),
        cache_free_bytes=shutil.disk_usage(there).free,
        versions=dict(_versions()),
    )


def _bandwidths(counts: set[int]) -> dict[int, float]:
    from engine.kernels.bench import read_bandwidth

    pool = load_native().ThreadPool
    return {count: read_bandwidth(pool(count)) for count in sorted(counts)}


def _gpus() -> Iterator[Gpu]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield Gpu(properties.name, properties.total_memory)


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    yield "system", platform.platform()
    for name in _LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _features(cpuinfo: str) -> tuple[str, ...]:
    flags = set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features") or "").split())
    return tuple(name for name, needed in _FEATURES.items() if needed <= flags)


def _physical_cores(usable: list[int], sys: Path) -> int | None:
    cores = set()
    for number in usable:
        folder = sys / "devices" / "system" / "cpu" / f"cpu{number}" / "topology"
        core = _text(folder / "physical_package_id"), _text(folder / "core_id")
        if None in core:
            return None
        cores.add(core)
    return len(cores)


def _cgroup_cores(sys: Path) -> float | None:
    """By control groups, version 2: ``QUOTA PERIOD`` in microseconds, or ``max PERIOD``."""
    text = _text(sys / "fs" / "cgroup" / "cpu.max")
    if text is None or text.startswith("max"):
        return None
    quota, period = map(int, text.split())
    return quota / period


def _difference(values: dict[str, int], whole: str, rest: str) -> int | None:
    return values[whole] - values[rest] if {whole, rest} <= values.keys() else None


def _chosen(text: str | None) -> str | None:
    """The word in brackets."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match and match[1]


def _field(text: str, name: str) -> str | None:
    match = re.search(rf"^{re.escape(name)}\s*: (.*)$", text, re.MULTILINE)
    return match and match[1].strip()


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
