"""How far the native decoder is from float32: prints top-1 agreement and mean KL divergence.

usage: python -m tests.models.accuracy FILE.gguf [--tokens N] [--kv-dtype float32|bfloat16]

The reference is transformers' float32 eager forward of the weights as `gguf.dequantize` gives them.
The text is code and prose of the Python standard library.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pydoc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as tf
from gguf.constants import GGMLQuantizationType

from engine.models.architectures import ARCHITECTURES, TOP_TENSORS, WeightLayout
from engine.models.cpu_runner import CpuRunner
from engine.models.gguf import hf_folder
from engine.models.gguf_header import TensorEntry, read_header
from engine.models.runner import KvBudget
from engine.models.source import ModelFiles, resolve
from engine.plan import Chunk, StepPlan

WINDOW = 500


@dataclass(frozen=True, slots=True)
class Accuracy:
    tokens: int
    top1_agreement: float
    mean_kl: float
    """KL(reference || native), in nats."""


def reference_model(files: ModelFiles) -> torch.nn.Module:
    """The model in float32 with its GGUF weights dequantized one by one."""
    config = tf.AutoConfig.from_pretrained(hf_folder(files))
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    header = read_header(files.weights)
    layout = ARCHITECTURES[config.model_type].layout
    data = np.memmap(files.weights, np.uint8, "r")
    state = {
        _hf_name(entry.name, layout): _floats(entry, data, layout, config)
        for entry in header.tensors
    }
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True, strict=True)
    _materialize_buffers(model)
    return model.eval()


def _materialize_buffers(model: torch.nn.Module) -> None:
    """Computed buffers (RoPE frequencies, the embedding scale) from a model of one layer."""
    config: Any = model.config
    if hasattr(config, "layer_types") and config.layer_types:
        small_config = type(config)(**(config.to_dict() | {"vocab_size": 8, "pad_token_id": 0}))
    else:
        small_config = type(config)(
            **(config.to_dict() | {"vocab_size": 8, "pad_token_id": 0, "num_hidden_layers": 1})
        )
    small_config.intermediate_size = 8
    buffers = dict(tf.AutoModelForCausalLM.from_config(small_config).named_buffers())
    for name, _ in list(model.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffers[name])


def _hf_name(name: str, layout: WeightLayout) -> str:
    *layer, stem, kind = name.split(".")
    names = layout.layer_tensors if layer else TOP_TENSORS
    hf_stem = next(name.safetensors for name in names.values() if name.gguf == stem)
    return f"{f'model.layers.{layer[1]}.' if layer else ''}{hf_stem}.{kind}"


def _floats(
    entry: TensorEntry, data: np.ndarray, layout: WeightLayout, config: tf.PreTrainedConfig
) -> torch.Tensor:
    raw = data[entry.offset : entry.offset + entry.num_bytes]
    values = gguf.dequantize(raw, GGMLQuantizationType[entry.element_type]).reshape(entry.shape)
    if layout.interleaved_gguf_rope and ".attn_q." in entry.name:
        values = _halves(values, config.num_attention_heads)
    elif layout.interleaved_gguf_rope and ".attn_k." in entry.name:
        values = _halves(values, config.num_key_value_heads)
    elif entry.name.endswith("norm.weight"):
        values = values - np.float32(layout.norm_offset)
    return torch.from_numpy(np.array(values, np.float32))


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def sample_text() -> str:
    """Code and prose."""
    import heapq
    import statistics
    import textwrap

    code = [inspect.getsource(module) for module in (heapq, textwrap)]
    prose = [pydoc.plain(pydoc.render_doc(statistics)), inspect.getdoc(argparse) or ""]
    return "\n".join(part[:6000] for pair in zip(code, prose, strict=True) for part in pair)


@torch.inference_mode()
def measure(
    files: ModelFiles, *, tokens: int = 2000, kv_dtype: str = "float32", variant: str = ""
) -> Accuracy:
    """Compare next-token distributions over windows of 500 tokens of text."""
    tokenizer = tf.AutoTokenizer.from_pretrained(hf_folder(files))
    ids = np.array(tokenizer(sample_text())["input_ids"][:tokens], np.int32)
    if len(ids) < tokens:
        raise ValueError(f"the sample text has only {len(ids)} tokens")
    reference = reference_model(files)
    budget = KvBudget(32, memory_bytes=256 << 20, max_requests=1)
    runner = CpuRunner.load(files, budget=budget, kv_dtype=kv_dtype, variant=variant)
    agreed, divergence = 0, 0.0
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        blocks = tuple(range(-(-len(window) // 32)))
        logits = runner.execute(StepPlan((Chunk("text", 0, window, blocks),)))
        expected = reference(torch.from_numpy(window).long()[None], use_cache=False).logits[0]
        agreed += int((logits.argmax(-1) == expected.argmax(-1)).sum())
        exact, native = expected.log_softmax(-1), logits.log_softmax(-1)
        divergence += float((exact.exp() * (exact - native)).sum())
    return Accuracy(len(ids), agreed / len(ids), divergence / len(ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--kv-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--variant", default="")
    options = parser.parse_args()
    result = measure(
        resolve(str(options.model)),
        tokens=options.tokens,
        kv_dtype=options.kv_dtype,
        variant=options.variant,
    )
    print(
        json.dumps(
            {"model": options.model.name, **{n: getattr(result, n) for n in result.__slots__}}
        )
    )


if __name__ == "__main__":
    main()
