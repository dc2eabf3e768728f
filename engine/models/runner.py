"""ModelRunner: what hides where and how the forward pass happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.models.memory import check_fits

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
    weight_bytes: int
    kernels: str
    """What computes the forward pass: a variant of the native kernels, or torch."""
    threads: int | None
    """CPU threads of the forward pass; None: it does not run on a CPU."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    """How much memory the KV blocks of one model may take."""

    block_size: int
    memory_bytes: int
    """On a CPU."""
    max_requests: int
    """More blocks than these can fill are of no use."""
    max_context: int | None = None
    """Tokens of one request at most; None: as many as the model was made for."""
    gpu_share: float = 0.0
    """Share of the GPU memory that is free once the weights are loaded."""
    in_main_memory: bool = False
    """Whether the blocks take main memory, so that it must be free."""

    def num_blocks(self, bytes_per_token: int, model_context: int, memory_bytes: int) -> int:
        """Blocks to allocate, at least 1.

        Args:
            bytes_per_token: K and V of one token in all layers.
            model_context: positions the model was made for.
            memory_bytes: what may be used, in the end.

        Raises:
            InsufficientMemoryError: so much main memory isn't free.
        """
        context = min(model_context, self.max_context or model_context)
        useful = self.max_requests * -(-context // self.block_size)
        block_bytes = bytes_per_token * self.block_size
        count = max(1, min(memory_bytes // block_bytes, useful))
        if self.in_main_memory:
            check_fits(count * block_bytes)
        return count


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
