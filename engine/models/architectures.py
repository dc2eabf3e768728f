"""The architectures the native decoder computes, one record each: what sets it apart, as data.

To add one of the known shapes, add its record: the readers of both kinds of files, the decoder and
the tests take their list from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class TensorName(NamedTuple):
    """What the files call a weight, without the layer in front and ``.weight`` behind."""

    safetensors: str
    gguf: str


TOP_TENSORS: Mapping[str, TensorName] = {
    "embedding": TensorName("model.embed_tokens", "token_embd"),
    "head": TensorName("lm_head", "output"),
    "final_norm": TensorName("model.norm", "output_norm"),
}
LAYER_MATRICES: Mapping[str, TensorName] = {
    "q": TensorName("self_attn.q_proj", "attn_q"),
    "k": TensorName("self_attn.k_proj", "attn_k"),
    "v": TensorName("self_attn.v_proj", "attn_v"),
    "o": TensorName("self_attn.o_proj", "attn_output"),
    "gate": TensorName("mlp.gate_proj", "ffn_gate"),
    "up": TensorName("mlp.up_proj", "ffn_up"),
    "down": TensorName("mlp.down_proj", "ffn_down"),
}
"""Each may have a bias."""

_BRANCH_NORMS: Mapping[str, TensorName] = {
    "attention_norm": TensorName("input_layernorm", "attn_norm"),
    "mlp_norm": TensorName("post_attention_layernorm", "ffn_norm"),
}
_NORMS_AROUND_BRANCHES: Mapping[str, TensorName] = {
    "attention_norm": TensorName("input_layernorm", "attn_norm"),
    "post_attention_norm": TensorName("post_attention_layernorm", "post_attention_norm"),
    "mlp_norm": TensorName("pre_feedforward_layernorm", "ffn_norm"),
    "post_mlp_norm": TensorName("post_feedforward_layernorm", "post_ffw_norm"),
}
_HEAD_NORMS: Mapping[str, TensorName] = {
    "q_norm": TensorName("self_attn.q_norm", "attn_q_norm"),
    "k_norm": TensorName("self_attn.k_norm", "attn_k_norm"),
}


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """How the files hold the weights; packed weights follow from it."""

    norms: Mapping[str, TensorName]
    """Of a layer, by the names the decoder has for them."""
    norm_offset: float = 0.0
    """What a safetensors norm weight lacks; GGUF files have it added."""
    interleaved_gguf_rope: bool = False
    """Rows of q and k stand in llama.cpp's order in a GGUF file: RoPE pairs side by side."""

    @property
    def layer_tensors(self) -> Mapping[str, TensorName]:
        return {**LAYER_MATRICES, **self.norms}


_PLAIN = WeightLayout(_BRANCH_NORMS)
_LLAMA = WeightLayout(_BRANCH_NORMS, interleaved_gguf_rope=True)


@dataclass(frozen=True, slots=True)
class Architecture:
    model_type: str
    """In config.json."""
    class_name: str
    """In transformers, and for people."""
    gguf_name: str
    """``general.architecture`` of a GGUF file."""
    layout: WeightLayout = _PLAIN
    scales_embedding: bool = False
    """By the root of the hidden size."""
    attention_scale_key: str | None = None
    """The value in config.json whose inverse root scales attention scores; None: the head size."""
    activation_key: str = "hidden_act"
    """The value in config.json that names the activation."""
    default_layer_type: str = "full_attention"
    """Of every layer, where config.json names none; ``sliding_attention`` has a window."""


ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.model_type: architecture
    for architecture in (
        Architecture("llama", "LlamaForCausalLM", gguf_name="llama", layout=_LLAMA),
        Architecture(
            "mistral",
            "MistralForCausalLM",
            gguf_name="llama",
            layout=_LLAMA,
            default_layer_type="sliding_attention",
        ),
        Architecture("qwen2", "Qwen2ForCausalLM", gguf_name="qwen2"),
        Architecture(
            "qwen3",
            "Qwen3ForCausalLM",
            gguf_name="qwen3",
            layout=WeightLayout({**_BRANCH_NORMS, **_HEAD_NORMS}),
        ),
        Architecture(
            "gemma3_text",
            "Gemma3ForCausalLM",
            gguf_name="gemma3",
            layout=WeightLayout({**_NORMS_AROUND_BRANCHES, **_HEAD_NORMS}, norm_offset=1.0),
            scales_embedding=True,
            attention_scale_key="query_pre_attn_scalar",
            activation_key="hidden_activation",
        ),
    )
}
"""By `Architecture.model_type`."""
