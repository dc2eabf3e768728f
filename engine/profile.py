"""Where the time of a native forward pass goes, by part, beside what memory and cores allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from engine.build import EngineParts
from engine.kernels import load_native
from engine.kernels.bench import BandwidthProbe
from engine.models.cpu_runner import CpuRunner
from engine.plan import Chunk, StepPlan

if TYPE_CHECKING:
    from engine.kernels._native import PackedMatrix

ROWS = (1, 8, 16, 32)
_CONTEXT = 128
_ROUNDS = 5
_PASSES = 4
_CACHED_OUTPUTS = 256
"""Rows of a matrix that stay in the second cache of a core or two, whatever their length."""
_CACHED_REPEATS = 20
_PRECISE_PARTS = frozenset({"qkv"})
"""Whose inputs come with the remainders of their rounding, as twice the rows."""


@dataclass(frozen=True, slots=True)
class PartTime:
    part: str
    milliseconds: float
    weight_megabytes: float
    memory_ms: float
    """What reading the weights takes at the measured bandwidth."""
    arithmetic_ms: float
    """What the products take at the rate of the same kernels over weights in the cache."""

    @property
    def limit_ms(self) -> float:
        return max(self.memory_ms, self.arithmetic_ms)


@dataclass(frozen=True, slots=True)
class PassProfile:
    """Steps of one model with `rows` rows at a context of 128 tokens; medians."""

    model: str
    rows: int
    read_gigabytes_per_second: float
    """Measured between the passes of this profile."""
    parts: tuple[PartTime, ...]


def profile_models(parts: EngineParts, rows: Sequence[int] = ROWS) -> Iterator[PassProfile]:
    """Profile steps of each number of rows, of every model that runs natively."""
    for name, runner in parts.runners.items():
        if isinstance(runner, CpuRunner):
            for count in rows:
                yield _profile(name, runner, count)


def _profile(name: str, runner: CpuRunner, rows: int) -> PassProfile:
    plan = _plan(runner, rows)
    runner.profile(plan, 1)  # pages weights in
    rounds: list[Mapping[str, float]] = []
    bandwidths: list[float] = []
    threads, variant = runner.info.threads or 1, runner.info.kernels
    probe = BandwidthProbe(load_native().ThreadPool(threads), variant)
    for _ in range(_ROUNDS):
        rounds.append(runner.profile(plan, _PASSES))
        bandwidths.append(probe.read())
    bandwidth = median(bandwidths)
    parts = []
    for part in rounds[0]:
        matrices = runner.matrices_of(part)
        megabytes = sum(matrix.nbytes for matrix in matrices) / 1e6
        multiplied = rows * (2 if part in _PRECISE_PARTS else 1)
        parts.append(
            PartTime(
                part=part,
                milliseconds=median(seconds[part] for seconds in rounds) * 1e3,
                weight_megabytes=megabytes,
                memory_ms=megabytes / bandwidth,
                arithmetic_ms=_arithmetic_seconds(matrices, multiplied, threads, variant) * 1e3,
            )
        )
    return PassProfile(name, rows, bandwidth, tuple(parts))


def _plan(runner: CpuRunner, rows: int) -> StepPlan:
    tokens = np.arange(rows, dtype=np.int32) % runner.info.vocab_size
    start = max(0, min(_CONTEXT, runner.num_blocks * runner.block_size - rows))
    blocks = tuple(range(-(-(start + rows) // runner.block_size)))
    return StepPlan((Chunk("profile", start, tokens, blocks, num_draft=rows - 1),))


def _arithmetic_seconds(
    matrices: Sequence[PackedMatrix], rows: int, threads: int, variant: str
) -> float:
    """What the products of matrices take where nothing waits for memory."""
    native = load_native()
    pool = native.ThreadPool(threads)
    seconds_of: dict[tuple[int, int], float] = {}
    total = 0.0
    for matrix in matrices:
        key = (int(matrix.format), matrix.cols)
        if key not in seconds_of:
            few = matrix.first_rows(min(matrix.rows, _CACHED_OUTPUTS))
            x = np.random.default_rng(0).standard_normal((rows, few.cols)).astype(np.float32)
            times = native.time_linear(pool, variant, [few] * _CACHED_REPEATS, x, _ROUNDS)
            seconds_of[key] = min(times) / _CACHED_REPEATS / few.rows
        total += seconds_of[key] * matrix.rows
    return total
