"""How near the packed linear layers of a model come to the memory's and the cores' limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from engine.kernels import load_native

if TYPE_CHECKING:
    from engine.kernels._native import PackedMatrix, ThreadPool

_PASSES = 7
_BANDWIDTH_BYTES = 1 << 29
_TIMED_BYTES = 256 << 20
"""Enough of a shape's matrices that they do not stay in the nearer caches."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One pass over the matrices of a shape."""

    rows: int
    """Activation rows, that is tokens of a step."""
    milliseconds: float
    gigabytes_per_second: float
    """Packed weights read."""
    gigaops_per_second: float
    """Two operations a weight and row."""


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    format: str
    outputs: int
    inputs: int
    matrices: int
    """Matrices of this shape in the model."""
    times: tuple[KernelTime, ...]


@dataclass(frozen=True, slots=True)
class KernelReport:
    variant: str
    threads: int
    read_gigabytes_per_second: float
    """Plain reads of a large buffer on the same threads: the limit of a one-row pass."""
    shapes: tuple[ShapeTimes, ...]


@dataclass(frozen=True, slots=True)
class _Shape:
    format: str
    outputs: int
    inputs: int


def bench_kernels(
    matrices: Sequence[tuple[str, PackedMatrix]],
    *,
    threads: int,
    variant: str = "",
    rows: Sequence[int],
) -> KernelReport:
    """Time every distinct layer shape.

    Args:
        matrices: each packed matrix of a model with the name of its format
            (`PackedWeights.native_matrices` gives them).
        variant: kernel variant by name ("" is the fastest this machine can run).

    Raises:
        ValueError: the variant is not one this machine can run.
    """
    native = load_native()
    pool = native.ThreadPool(threads)
    groups: dict[_Shape, list[PackedMatrix]] = {}
    for format_, matrix in matrices:
        groups.setdefault(_Shape(format_, matrix.rows, matrix.cols), []).append(matrix)
    return KernelReport(
        variant=variant or native.variants()[0],
        threads=threads,
        read_gigabytes_per_second=read_bandwidth(pool, variant),
        shapes=tuple(
            ShapeTimes(
                shape.format,
                shape.outputs,
                shape.inputs,
                len(group),
                tuple(_time(pool, variant, group, count) for count in rows),
            )
            for shape, group in groups.items()
        ),
    )


class BandwidthProbe:
    """Plain reads of a large buffer on a pool's threads, to be repeated between passes."""

    def __init__(self, pool: ThreadPool, variant: str = "") -> None:
        self._pool = pool
        self._variant = variant
        self._data = np.ones(_BANDWIDTH_BYTES, np.uint8)

    def read(self) -> float:
        """One reading, in 1e9 bytes a second."""
        started = perf_counter()
        load_native().read_bytes(self._pool, self._variant, self._data)
        return self._data.nbytes / (perf_counter() - started) / 1e9


def read_bandwidth(pool: ThreadPool, variant: str = "") -> float:
    """The median of a few readings, in 1e9 bytes a second."""
    probe = BandwidthProbe(pool, variant)
    return median(probe.read() for _ in range(_PASSES))


def _time(pool: ThreadPool, variant: str, group: Sequence[PackedMatrix], rows: int) -> KernelTime:
    size = group[0].nbytes
    some = list(group[: max(1, -(-_TIMED_BYTES // size))])
    x = np.random.default_rng(0).standard_normal((rows, group[0].cols)).astype(np.float32)
    # The first pass pages the weights in.
    seconds = median(load_native().time_linear(pool, variant, some, x, _PASSES + 1)[1:])
    weights = len(some) * group[0].rows * group[0].cols
    return KernelTime(
        rows=rows,
        milliseconds=seconds * 1e3,
        gigabytes_per_second=len(some) * size / seconds / 1e9,
        gigaops_per_second=2 * rows * weights / seconds / 1e9,
    )
