"""A model without weights whose logits depend on every token in its paged KV cache.

The "K and V" of a token are its id and position, written to its slot. Logits are a hash of the
whole context as read back through the block table, so a wrong slot, a stale block or a mixed-up
table changes the output. The tokenizer is bytes.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.models.runner import ModelInfo
from engine.plan import StepPlan, pack

VOCAB_SIZE = 64


class MockRunner:
    """Next token: usually what followed the last two tokens before (so drafts get accepted)."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        salt: int = 0,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_passes = 0
        self.largest_step = 0
        self._salt = salt
        self._tokens = np.full(num_blocks * block_size, -1, np.int64)
        self._positions = np.full(num_blocks * block_size, -1, np.int64)
        self.info = ModelInfo("Mock", 0, vocab_size, 4096, "cpu", "float32", 8, 0, "mock", 1)

    def execute(self, plan: StepPlan) -> torch.Tensor:
        packed = pack(plan, self.block_size)
        self.num_passes += 1
        self.largest_step = max(self.largest_step, len(packed.token_ids))
        if len(set(packed.slots.tolist())) != len(packed.slots):
            raise AssertionError("two rows of one step share a slot")
        self._tokens[packed.slots] = packed.token_ids
        self._positions[packed.slots] = packed.positions
        rows = []
        for row in packed.logit_rows:
            owner = int(np.searchsorted(packed.query_starts, row, side="right")) - 1
            context = np.arange(packed.positions[row] + 1)
            table = packed.block_tables[owner]
            slots = table[context // self.block_size] * self.block_size + context % self.block_size
            if (self._positions[slots] != context).any():
                raise AssertionError("the cache does not hold the context that is attended to")
            rows.append(self._logits(self._tokens[slots]))
        return torch.tensor(np.array(rows, np.float32).reshape(len(rows), self.info.vocab_size))

    def _logits(self, context: np.ndarray) -> np.ndarray:
        weights = np.arange(1, len(context) + 1) * 2654435761 + self._salt
        digest = int((context * weights).sum()) & 0xFFFFFFFF
        noise = np.random.default_rng(digest).normal(size=self.info.vocab_size)
        recent = (int(context[-1]) * 31 + int(context[-2:].sum())) % self.info.vocab_size
        noise[recent] += 3.0
        return noise
