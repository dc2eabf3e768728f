"""Row reductions over a vocabulary. On a CPU numpy's, which take a tenth to a thirtieth of the time
that torch's take there."""

from __future__ import annotations

import numpy as np
import torch


def argmax(values: torch.Tensor) -> torch.Tensor:
    """int64[N]: the first of each row's largest values in float32[N, V]; a NaN is the largest."""
    if values.is_cuda:
        return values.argmax(dim=1)
    return torch.from_numpy(values.numpy().argmax(axis=1))


def ascending(values: torch.Tensor) -> torch.Tensor:
    """Each row of float32[N, V] sorted, the smallest first."""
    if values.is_cuda:
        return values.sort(dim=1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=1))


def double_sum(values: torch.Tensor) -> torch.Tensor:
    """float64[N]: sums of float32[N, V]."""
    if values.is_cuda:
        return values.sum(dim=1, dtype=torch.float64)
    return torch.from_numpy(values.numpy().sum(axis=1, dtype=np.float64))
