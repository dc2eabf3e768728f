"""Keyed Gumbel noise: a counter-based hash instead of a stateful random generator.

The noise of (request seed, output position, token id) is always the same, so a sampled token is a
function of the request alone: not of batch mates, draft length, preemption or drafter. A draft
that draws with the same noise agrees with the target far more often than a greedy one (Daliri,
Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
arXiv 2408.07978).
"""

from __future__ import annotations

import math

import torch

UNIFORM_BITS = 32
_STRIDE = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)  # splitmix64's finaliser

MAX_NOISE = -math.log(-math.log1p(-(2.0 ** -(UNIFORM_BITS + 1))))
"""No token's noise exceeds this (about 22.9)."""


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hash int64[N] request seeds and int64[N] output positions to int64[N] keys."""
    return _mix(_mix(seeds) + positions * _STRIDE)


def uniform_bits(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """32 random bits each for int64 row keys and token ids whose shapes match."""
    return _shift_right(_mix(keys + token_ids * _STRIDE), 64 - UNIFORM_BITS)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, for int64 row keys and token ids of one shape."""
    uniform = (uniform_bits(keys, token_ids).to(torch.float64) + 0.5) * 2.0**-UNIFORM_BITS
    return -torch.log(-torch.log(uniform))


def _mix(value: torch.Tensor) -> torch.Tensor:
    """Splitmix64's finaliser on int64 that wraps around (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value ^ _shift_right(value, 30)) * _MULTIPLIERS[0]
    value = (value ^ _shift_right(value, 27)) * _MULTIPLIERS[1]
    return value ^ _shift_right(value, 31)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)
