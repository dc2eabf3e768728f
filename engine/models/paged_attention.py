"""Paged attention in plain torch, registered with transformers' AttentionInterface.

Every chunk of a step lies in one packed row. Keys and values are written to the paged cache by
slot; chunks of similar context length are gathered into one padded batch and attend together.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.models.runner import UnsupportedModelError
from engine.plan import Int32Array, PackedStep

ATTENTION_NAME = "slipstream"

_LONGEST_BATCHED_QUERY = 32
"""Chunks with more rows are parts of prompts; they attend on their own, without padding."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """K and V of every layer, [layers, slots, kv heads, head size] each."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(
        cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> KvCache:
        """Zeros: a stale slot that masking multiplies by zero must not hold a NaN."""
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


@dataclass(slots=True)
class _Group:
    """R chunks that attend together, padded to Q rows and C context tokens."""

    rows: torch.Tensor
    """int64[R, Q]: rows of the packed step; padding repeats a row of the chunk."""
    slots: torch.Tensor
    """int64[R, C]: cache slots of the context; padding repeats the last."""
    positions: torch.Tensor
    """int64[R, Q]"""
    valid: torch.Tensor
    """bool[R, Q]: not padding."""
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        """bool[R, 1, Q, C]: which context tokens each row sees; built once a step and window."""
        if window not in self.masks:
            context = torch.arange(self.slots.shape[1], device=self.slots.device)
            distance = self.positions[:, :, None] - context
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            self.masks[window] = visible[:, None]
        return self.masks[window]


class AttentionStep:
    """One step's batch metadata on the model's device, and the cache it works on."""

    def __init__(self, packed: PackedStep, block_size: int, cache: KvCache) -> None:
        self.cache = cache
        self.device = cache.keys.device
        self.slots = torch.from_numpy(packed.slots).to(self.device)
        self.num_calls = 0
        self.groups = [self._group(packed, block_size, members) for members in _batches(packed)]

    def _group(self, packed: PackedStep, block_size: int, members: Int32Array) -> _Group:
        first = packed.query_starts[members]
        lengths = packed.query_starts[members + 1] - first
        offsets = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        rows = first[:, None] + offsets
        context_lens = packed.context_lens[members]
        # Padding reads the chunk's own last token: what others left elsewhere may be a NaN, which
        # a mask does not multiply away.
        context = np.minimum(np.arange(context_lens.max()), context_lens[:, None] - 1)
        tables = packed.block_tables[members].astype(np.int64)
        blocks = np.take_along_axis(tables, context // block_size, axis=1)
        return _Group(
            rows=self._tensor(rows),
            slots=self._tensor(blocks * block_size + context % block_size),
            positions=self._tensor(packed.positions[rows]),
            valid=self._tensor(np.arange(lengths.max()) < lengths[:, None], torch.bool),
        )

    def _tensor(self, array: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, dtype)


def _batches(packed: PackedStep) -> list[Int32Array]:
    """Chunk indexes, grouped so that padding at most doubles a chunk's context."""
    lengths = np.diff(packed.query_starts)
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (length, context) in enumerate(zip(lengths, packed.context_lens, strict=True)):
        alone = length > _LONGEST_BATCHED_QUERY
        batches[(index, 0) if alone else (-1, int(context).bit_length())].append(index)
    return [np.asarray(members, np.int32) for members in batches.values()]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slipstream_step: AttentionStep,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the packed step.

    Args:
        query: [1, H, T, D]
        key: [1, G, T, D] with G key-value heads.
        value: [1, G, T, D]

    Returns:
        [1, T, H, D] and no attention weights.
    """
    for name in ("softcap", "s_aux"):
        if others.get(name) is not None:
            raise UnsupportedModelError(f"attention with {name!r} is not supported")
    step = slipstream_step
    step.num_calls += 1
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    keys.index_copy_(0, step.slots, key[0].transpose(0, 1))
    values.index_copy_(0, step.slots, value[0].transpose(0, 1))
    packed_query = query[0].transpose(0, 1)
    output = torch.empty_like(packed_query)
    for group in step.groups:
        attended = _attend(group, packed_query, keys, values, scaling, sliding_window)
        output[group.rows[group.valid]] = attended[group.valid]
    return output[None], None


def _attend(
    group: _Group,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[R, Q, H, D] for one group; query heads that share K and V become rows of one head."""
    num_chunks, num_rows = group.rows.shape
    num_heads, head_size = query.shape[1:]
    num_kv_heads = keys.shape[1]
    shared = num_heads // num_kv_heads
    queries = query[group.rows].view(num_chunks, num_rows, num_kv_heads, shared, head_size)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(
        num_chunks, num_kv_heads, shared * num_rows, head_size
    )
    attended = scaled_dot_product_attention(
        queries,
        keys[group.slots].transpose(1, 2),
        values[group.slots].transpose(1, 2),
        attn_mask=group.mask(window).repeat(1, 1, shared, 1),
        scale=scaling,
    )
    attended = attended.view(num_chunks, num_kv_heads, shared, num_rows, head_size)
    return attended.permute(0, 3, 1, 2, 4).reshape(num_chunks, num_rows, num_heads, head_size)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
