"""Writes tiny GGUF files with random weights and vocabularies: one-layer Llamas and others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH_NAMES, GGUFWriter, TokenType, dequantize, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig

HIDDEN = 16
HEADS = 2
INTERMEDIATE = 24
CONTEXT = 64
CHAT_TEMPLATE = "{{ messages[0]['content'] }}<|im_end|>"
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_TOKEN = "<tool_call>"

Weights = dict[str, npt.NDArray[np.float32]]


def byte_level_vocabulary() -> tuple[list[str], list[TokenType], list[str]]:
    """Tokens, their types and merges that make ``12``, ``hi`` and ``Ġhi``; the last is padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "h i", "Ġ hi"]
    tokens = [*CONTROL_TOKENS, USER_TOKEN, *alphabet, "12", "hi", "Ġhi", "[PAD263]"]
    types = [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED]
    types += [TokenType.NORMAL] * (len(tokens) - 5) + [TokenType.UNUSED]
    return tokens, types, merges


def sentencepiece_vocabulary() -> tuple[list[str], list[TokenType]]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    normal = ["h", "i", "▁", "s", "<", ">", "/", "hi", "▁hi", "▁▁", "</", "s>"]
    return tokens + normal, types + [TokenType.NORMAL] * len(normal)


def shapes_of(vocabulary_size: int, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    """Of a one-layer Llama's parameters under Hugging Face's names."""
    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": (vocabulary_size, hidden),
        "lm_head.weight": (vocabulary_size, hidden),
        "model.norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
        f"{layer}.self_attn.k_proj.weight": (hidden, hidden),
        f"{layer}.self_attn.v_proj.weight": (hidden, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}.mlp.gate_proj.weight": (intermediate, hidden),
        f"{layer}.mlp.up_proj.weight": (intermediate, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, intermediate),
    }


def _random_blocks(
    quantization: str, shape: tuple[int, ...], rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """uint8[rows, row bytes]: any byte makes a small number where it is part of a float."""
    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[quantization]]
    blocks = rng.integers(0, 0x38, (shape[0], shape[1] // columns, size), dtype=np.uint8)
    if quantization == "MXFP4":
        blocks[..., 0] = 120  # the exponent of the scale
    return blocks.reshape(shape[0], -1)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
}


def _rotate_pairs(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """llama.cpp keeps the two halves of a rotary pair side by side."""
    halves = weight.reshape(HEADS, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _unrotate_pairs(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    pairs = weight.reshape(HEADS, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def write_tiny_gguf(
    path: Path,
    *,
    kind: str = "gpt2",
    pre: str = "smollm",
    extra: Mapping[str, Any] | None = None,
    extra_tensor: str | None = None,
    filler: int = 0,
    quantization: str | None = None,
    tensors_a_part: int = 0,
) -> Weights:
    """Write the file; returns its parameters under Hugging Face's names.

    Args:
        filler: bytes of no meaning before the metadata and again behind it.
        quantization: of the matrices, which have 256 columns then; None: float32.
        tensors_a_part: split into files of so many; 0: one file.
    """
    hidden, intermediate = (HIDDEN, INTERMEDIATE) if quantization is None else (256, 256)
    writer = GGUFWriter(path, "llama", split_max_tensors=tensors_a_part)
    if filler:
        writer.add_string("tiny.before", "." * filler)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(hidden // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary_size = _add_vocabulary(writer, kind, pre)
    for key, value in (extra or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key, value)
    if filler:
        writer.add_string("tiny.behind", "." * filler)
    rng = np.random.default_rng(5)
    weights: Weights = {}
    for name, shape in shapes_of(vocabulary_size, hidden, intermediate).items():
        stem, _, suffix = name.rpartition(".")
        own_name, rotates = f"{_GGUF_NAMES[stem]}.{suffix}", stem.endswith(("q_proj", "k_proj"))
        if quantization is None or len(shape) == 1:
            weights[name] = rng.normal(size=shape).astype(np.float32)
            writer.add_tensor(own_name, _rotate_pairs(weights[name]) if rotates else weights[name])
        else:
            type_ = GGMLQuantizationType[quantization]
            blocks = _random_blocks(quantization, shape, rng)
            values = dequantize(blocks, type_)
            weights[name] = _unrotate_pairs(values) if rotates else values
            writer.add_tensor(own_name, blocks, raw_dtype=type_)
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.ones(HIDDEN, dtype=np.float32))
    _write(writer)
    return weights


def write_gguf_of(path: Path, architecture: str, config: PreTrainedConfig) -> None:
    """Write a file of random weights in the shape of a config; its vocabulary has 264 tokens.

    Args:
        architecture: as GGUF files name it.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if (head_size := getattr(config, "head_dim", None)) is not None:
        writer.add_rope_dimension_count(head_size)
        writer.add_key_length(head_size)
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_vocabulary(writer, "gpt2", "smollm")
    with torch.device("meta"):
        parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    (known,) = (arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(known, config.num_hidden_layers)
    rng = np.random.default_rng(6)
    for name, parameter in parameters.items():
        values = rng.normal(scale=0.2, size=tuple(parameter.shape)) + (parameter.dim() == 1)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(gguf_name, values.astype(np.float32))
    _write(writer)


def _add_vocabulary(writer: GGUFWriter, kind: str, pre: str) -> int:
    """Returns its size."""
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        tokens, types, merges = byte_level_vocabulary()
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
        writer.add_chat_template(CHAT_TEMPLATE)
    else:
        tokens, types = sentencepiece_vocabulary()
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    return len(tokens)


def _write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
