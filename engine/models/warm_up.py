"""A runner's first passes: they fault in the weights and show what a pass costs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from engine.models.runner import ModelRunner
from engine.plan import Chunk, StepPlan


def time_passes(runner: ModelRunner, rows: Iterable[int]) -> Iterator[tuple[int, float]]:
    """Run passes of the given numbers of rows, one request each; yields (rows, seconds).

    Uses the first KV blocks, so nobody may hold them. The very first pass is not reported.
    """
    _time_pass(runner, 1)
    for count in rows:
        yield count, _time_pass(runner, count)


def can_compute(runner: ModelRunner, block: int) -> bool:
    """Whether a pass of one token gives numbers, as it must; raises what the pass raises.

    Args:
        block: a KV block that nobody holds.
    """
    return bool(_pass(runner, 1, (block,)).max().isfinite())


def _time_pass(runner: ModelRunner, rows: int) -> float:
    began = time.perf_counter()
    # Reading a value makes an asynchronous device finish.
    _pass(runner, rows, tuple(range(-(-rows // runner.block_size)))).flatten()[0].item()
    return time.perf_counter() - began


def _pass(runner: ModelRunner, rows: int, blocks: tuple[int, ...]) -> torch.Tensor:
    chunk = Chunk("warm-up", 0, np.zeros(rows, np.int32), blocks, first_logit=0)
    return runner.execute(StepPlan((chunk,)))
