"""What the native decoder has to know of a Llama-shaped model, from its Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.kernels import load_native
from engine.models.architectures import ARCHITECTURES, Architecture
from engine.models.attention_shape import attention_shape
from engine.models.runner import UnsupportedModelError

_FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE kinds whose frequencies do not depend on the length of the text."""
_ACTIVATIONS = {"silu": "SILU", "gelu_pytorch_tanh": "GELU_TANH"}
"""Names in the extension's `Activation`, by those in a config."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    window: int
    """Positions a token attends to at most, its own included; 0: all."""
    rope_table: int
    """Index into `DecoderSpec.inverse_frequencies`."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and constants of one model."""

    architecture: Architecture
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    norm_eps: float
    attention_scale: float
    embedding_scale: float
    activation: str
    """By its name in transformers."""
    tied: bool
    """The head is the embedding matrix."""
    inverse_frequencies: tuple[tuple[float, ...], ...]
    """RoPE tables, [head_dim / 2] each."""
    layers: tuple[LayerSpec, ...]

    def native_shape(self) -> dict[str, Any]:
        """The keyword values the extension's Decoder takes."""
        names = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "norm_eps")
        values = {name: getattr(self, name) for name in names}
        return values | {
            "attention_scale": self.attention_scale,
            "embedding_scale": self.embedding_scale,
            "activation": load_native().Activation[_ACTIVATIONS[self.activation]],
            "inverse_frequencies": [list(table) for table in self.inverse_frequencies],
        }


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Read the values of a config.json.

    Raises:
        UnsupportedModelError: the native decoder can't compute this model; says why.
    """
    model_type = config.get("model_type")
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None:
        name = (config.get("architectures") or [model_type])[0]
        raise UnsupportedModelError(f"the native CPU decoder does not know the architecture {name}")
    full = AutoConfig.for_model(**config)
    activation = str(getattr(full, architecture.activation_key))
    _refuse_variations(full, activation)
    heads, kv_heads, head_dim = attention_shape(full)
    scaled_by = architecture.attention_scale_key
    query_scale: float = (getattr(full, scaled_by) if scaled_by else head_dim) ** -0.5
    layers, tables, rope_scale = _layers(full, head_dim, architecture.default_layer_type)
    return DecoderSpec(
        architecture=architecture,
        hidden=full.hidden_size,
        intermediate=full.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=full.vocab_size,
        max_context=full.max_position_embeddings,
        norm_eps=full.rms_norm_eps,
        attention_scale=query_scale * rope_scale**2,
        embedding_scale=full.hidden_size**0.5 if architecture.scales_embedding else 1.0,
        activation=activation,
        tied=bool(full.tie_word_embeddings),
        inverse_frequencies=tables,
        layers=layers,
    )


def _refuse_variations(config: PreTrainedConfig, activation: str) -> None:
    heads, kv_heads, head_dim = attention_shape(config)
    layer_types = set(getattr(config, "layer_types", None) or ())
    problems = {
        f"activation {activation}": activation not in _ACTIVATIONS,
        "soft-capped attention scores": getattr(config, "attn_logit_softcapping", None),
        "soft-capped logits": getattr(config, "final_logit_softcapping", None),
        "bidirectional attention": getattr(config, "use_bidirectional_attention", None),
        f"layers of types {sorted(layer_types)}": layer_types
        - {"full_attention", "sliding_attention"},
        f"{heads} heads on {kv_heads} KV heads": heads % kv_heads,
        f"a head size of {head_dim}": head_dim % 2,
    }
    for problem, applies in problems.items():
        if applies:
            raise UnsupportedModelError(f"the native CPU decoder does not support {problem}")


def _layers(
    config: PreTrainedConfig, head_dim: int, default_layer_type: str
) -> tuple[tuple[LayerSpec, ...], tuple[tuple[float, ...], ...], float]:
    """Layers, RoPE tables and the factor that scaled RoPE puts on queries and keys."""
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [default_layer_type] * config.num_hidden_layers
    per_type = "full_attention" in config.rope_parameters
    kinds = sorted(set(types)) if per_type else [None]
    tables, scales = zip(*(_rope_table(config, kind, head_dim) for kind in kinds), strict=True)
    if len(set(scales)) > 1:
        raise UnsupportedModelError("the native CPU decoder does not support RoPE scales by layer")
    layers = tuple(
        LayerSpec(
            window=window if kind == "sliding_attention" else 0,
            rope_table=kinds.index(kind) if per_type else 0,
        )
        for kind in types
    )
    return layers, tables, scales[0]


def _rope_table(
    config: PreTrainedConfig, layer_type: str | None, head_dim: int
) -> tuple[tuple[float, ...], float]:
    rope = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _FIXED_ROPE_TYPES:
        raise UnsupportedModelError(f"the native CPU decoder does not support RoPE {rope_type!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("the native CPU decoder does not support partial RoPE")
    if rope_type == "default":
        # The same float32 operations as transformers, to get the same bits.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return tuple((1.0 / rope["rope_theta"] ** exponents).tolist()), 1.0
    arguments = {"layer_type": layer_type} if layer_type else {}
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), **arguments)
    return tuple(frequencies.tolist()), float(scale)
