"""Every record of the table against what transformers and gguf know of the same architecture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.kernels import native_available
from engine.models.architectures import ARCHITECTURES, TOP_TENSORS, Architecture, TensorName
from engine.models.cpu_runner import CpuRunner
from engine.models.gguf import torch_folder
from engine.models.runner import KvBudget, UnsupportedModelError
from engine.models.source import resolve
from engine.models.weight_files import open_weights
from tests.models.test_cpu_runner import blocks_for, in_chunks
from tests.models.tiny_gguf import write_gguf_of, write_tiny_gguf

SHAPE = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
NOT_IN_GGUF = {"qwen3": {"head_dim": 128}, "gemma3": {"head_dim": 16, "sliding_window": 6}}
"""What transformers takes for granted in a file of that name, and a window that 40 tokens leave."""


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def tiny_config(architecture: Architecture) -> tf.PreTrainedConfig:
    options = NOT_IN_GGUF.get(architecture.gguf_name, {})
    return tf.AutoConfig.for_model(architecture.model_type, **(SHAPE | options))


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_names_are_those_of_transformers_and_gguf(architecture: Architecture) -> None:
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture.model_type]
    assert class_name == architecture.class_name
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(tiny_config(architecture))
    (known,) = (arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture.gguf_name)
    gguf_names = get_tensor_name_map(known, 1)

    def names(prefix: str, gguf_prefix: str) -> set[TensorName]:
        stems = {
            name.removesuffix(".weight").removeprefix(prefix)
            for name in model.state_dict()
            if name.startswith(prefix) and name.endswith(".weight")
        }
        gguf_stems = {stem: gguf_names.get_name(f"{prefix}{stem}") or "" for stem in stems}
        return {TensorName(s, g.removeprefix(gguf_prefix)) for s, g in gguf_stems.items()}

    assert names("model.layers.0.", "blk.0.") == set(architecture.layout.layer_tensors.values())
    top = {name for name in names("", "") if ".layers." not in name.safetensors}
    assert top == set(TOP_TENSORS.values())


@pytest.mark.skipif(native_available() is not None, reason=str(native_available()))
@pytest.mark.parametrize("gguf_name", sorted({a.gguf_name for a in ARCHITECTURES.values()}))
def test_a_gguf_file_is_computed_as_transformers_unpacks_it(gguf_name: str, tmp_path: Path) -> None:
    """Row order of RoPE and offsets of norms as they are in GGUF files."""
    architecture = next(a for a in ARCHITECTURES.values() if a.gguf_name == gguf_name)
    path = tmp_path / "tiny.gguf"
    write_gguf_of(path, gguf_name, tiny_config(architecture))
    files = resolve(str(path))
    model = tf.AutoModelForCausalLM.from_pretrained(
        torch_folder(files), attn_implementation="eager"
    )
    assert model.config.model_type == architecture.model_type
    runner = CpuRunner.load(
        files,
        budget=KvBudget(4, memory_bytes=8 << 20, max_requests=1),
        quantization="none",
        threads=2,
    )
    tokens = np.random.default_rng(4).integers(0, 264, 40)
    logits = in_chunks(runner, tokens, [40], blocks_for(runner, 1)[0])
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


def test_a_gguf_file_of_another_architecture_than_its_configuration_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    with pytest.raises(UnsupportedModelError, match="does not know llama as Qwen3ForCausalLM"):
        open_weights(resolve(str(path)), ARCHITECTURES["qwen3"])
