"""The heads of a model, where its config may leave values to be inferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class AttentionShape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


def attention_shape(config: PreTrainedConfig) -> AttentionShape:
    heads = int(config.num_attention_heads)
    return AttentionShape(
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
    )
