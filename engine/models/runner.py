"""ModelRunner: what hides where and how the forward pass happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from engine.plan import StepPlan


class UnsupportedModelError(ValueError):
    """The model's architecture can't be served; the message names it."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model that the engine and the start-up summary need."""

    architecture: str
    num_parameters: int
    vocab_size: int
    """Width of a row of logits (may exceed the tokenizer's vocabulary: padding)."""
    max_context: int
    """Positions the model was made for."""
    device: str
    dtype: str
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class KvBudget:
    """How much memory the KV blocks may take, and how many tokens are of use at most."""

    block_size: int
    memory_bytes: int
    max_tokens: int

    def num_blocks(self, bytes_per_token: int) -> int:
        """At least 1, at most what `max_tokens` need."""
        affordable = self.memory_bytes // (bytes_per_token * self.block_size)
        return max(1, min(affordable, -(-self.max_tokens // self.block_size)))


class ModelRunner(Protocol):
    """Runs forward passes of one model over its own paged KV cache.

    All KV memory is allocated when the runner is made. A runner is used by one thread.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step: write K and V of every row to its slot, attend causally.

        Returns:
            float32[L, vocab_size] logits of the rows that need them, in plan order. The tensor
            may be reused by the next call.
        """
        ...
