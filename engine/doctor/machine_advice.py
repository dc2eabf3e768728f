"""What a machine's facts mean: the speed to expect, what is wrong, what would be better."""

from __future__ import annotations

from dataclasses import dataclass

from engine.doctor.machine import Machine

_SIZES = (0.135e9, 0.5e9, 1.5e9, 3e9, 8e9, 14e9, 32e9)
"""Parameters of models to expect something of."""
_BYTES_A_WEIGHT = 4.6 / 8
"""Of Q4_K_M as it is packed; the token embedding, which is read by rows, left aside."""
_GIB = 1 << 30
_LEAST_DISK = 2 * _GIB
_LEAST_MEMORY = _GIB
_MEMORY_FOR_MODEL = 0.8
"""Of the free memory; the rest is for KV blocks and the process itself."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The most that one request can be decoded with, plain, by a model of 4-bit weights."""

    parameters: float
    weight_bytes: int
    fits: bool
    tokens_per_s: float | None
    """Every weight is read for each token: bandwidth by bytes; None: nothing was measured."""


@dataclass(frozen=True, slots=True)
class Findings:
    expectations: tuple[Expectation, ...]
    faults: tuple[str, ...]
    """What keeps a server from working as it should."""
    advice: tuple[str, ...]
    """What would be better otherwise."""


def judge(machine: Machine) -> Findings:
    return Findings(_expectations(machine), tuple(_faults(machine)), tuple(_advice(machine)))


def _expectations(machine: Machine) -> tuple[Expectation, ...]:
    bandwidth = max(machine.read_gb_per_s.values(), default=None)
    free = machine.free_memory_bytes
    return tuple(
        Expectation(
            parameters=size,
            weight_bytes=int(size * _BYTES_A_WEIGHT),
            fits=free is None or size * _BYTES_A_WEIGHT < _MEMORY_FOR_MODEL * free,
            tokens_per_s=bandwidth and bandwidth * 1e9 / (size * _BYTES_A_WEIGHT),
        )
        for size in _SIZES
    )


def _faults(machine: Machine) -> list[str]:
    faults = []
    if machine.kernels_missing is not None and not machine.gpus:
        faults.append(
            f"Models would run on torch, many times slower: {machine.kernels_missing}. "
            "Install a wheel, or a C++ compiler (g++) and install again."
        )
    if not machine.cache_writable:
        faults.append(
            f"{machine.cache} can't be written; SLIPSTREAM_CACHE can name another folder."
        )
    elif machine.cache_free_bytes < _LEAST_DISK:
        faults.append(
            f"Only {machine.cache_free_bytes / _GIB:.1f} GiB are free for {machine.cache}: models "
            "are kept there twice, as fetched and as packed. `slipstream cache prune` makes room."
        )
    if machine.free_memory_bytes is not None and machine.free_memory_bytes < _LEAST_MEMORY:
        faults.append(f"Only {machine.free_memory_bytes / _GIB:.1f} GiB of memory are free.")
    return faults


def _advice(machine: Machine) -> list[str]:
    advice = []
    cores = machine.usable_physical_cores or machine.usable_cores
    if machine.cgroup_cores is not None and machine.threads > machine.cgroup_cores:
        advice.append(
            f"The container may use {machine.cgroup_cores:g} cores' time, but {machine.threads} "
            f"threads would run, and all would be stopped together: "
            f"--threads {max(1, int(machine.cgroup_cores))}"
        )
    elif machine.threads > machine.usable_cores:
        advice.append(
            f"{machine.threads} threads on {machine.usable_cores} cores wait for each other: "
            f"--threads {cores}"
        )
    elif machine.threads > cores:
        advice.append(
            f"{machine.threads} threads share {cores} physical cores; try --threads {cores}, which "
            "is often as fast."
        )
    elif machine.threads < cores:
        advice.append(f"{cores} cores may be used, but only {machine.threads} threads are set.")
    if machine.kernels == "scalar":
        advice.append(
            "The CPU has none of the instructions that there are kernels for (AVX2, NEON dot "
            "product): models run, but slowly."
        )
    if machine.swap_used_bytes:
        advice.append(
            f"{machine.swap_used_bytes / _GIB:.1f} GiB are swapped out; weights that are swapped "
            "out take a hundred times as long to read."
        )
    if machine.huge_pages == "never":
        advice.append(
            "Transparent huge pages are off; with `madvise` or `always` the KV memory is read "
            "a little faster."
        )
    return advice
