"""One damaged weight of a whole model: its logits are NaN, never finite garbage."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import Quantization
from engine.kernels import native_available
from tests.models.test_cpu_runner import (
    FAMILIES,
    VARIANTS,
    VOCAB,
    blocks_for,
    chunk,
    load,
    run,
    save_random_model,
)

pytestmark = pytest.mark.skipif(native_available() is not None, reason=str(native_available()))
NOT_FINITE = (math.nan, math.inf, -math.inf)
LENGTH = 21


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Change a model's weights; nothing that was packed of the old ones stays."""
    save_file(tensors, folder / "model.safetensors")
    shutil.rmtree(folder / "cache", ignore_errors=True)


def last_logits(folder: Path, quantization: Quantization, variant: str) -> torch.Tensor:
    runner = load(folder, quantization, variant=variant)
    tokens = np.arange(LENGTH) % VOCAB
    blocks = blocks_for(runner, 1)[0]
    run(runner, chunk(tokens, 0, LENGTH - 1, blocks, LENGTH - 1))
    return run(runner, chunk(tokens, LENGTH - 1, LENGTH, blocks))[0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", ["llama with biases and an untied head", "gemma3_text"])
def test_one_damaged_weight_leaves_no_finite_logit(
    family: str, quantization: Quantization, variant: str, tmp_path: Path
) -> None:
    save_random_model(FAMILIES[family](), tmp_path)
    clean = load_file(tmp_path / "model.safetensors")
    assert last_logits(tmp_path, quantization, variant).isfinite().all()
    rng = np.random.default_rng(11)
    for number, name in enumerate(sorted(clean)):
        spoilt = {key: tensor.clone() for key, tensor in clean.items()}
        tensor = spoilt[name]
        index = [int(rng.integers(size)) for size in tensor.shape]
        if name == "model.embed_tokens.weight":
            index[0] = 2  # a token of the prompt
        tensor[tuple(index)] = NOT_FINITE[number % 3]
        write(spoilt, tmp_path)
        logits = last_logits(tmp_path, quantization, variant)
        if name == "lm_head.weight":
            assert logits[index[0]].isnan(), name
            assert logits.isnan().sum() == 1
        else:
            assert logits.isnan().all(), f"{name}{index}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_overflowing_weights_leave_no_finite_logit(
    variant: str, kv_dtype: str, tmp_path: Path
) -> None:
    """Every weight is finite, and what it makes is not."""
    save_random_model(FAMILIES["llama"](), tmp_path)
    clean = load_file(tmp_path / "model.safetensors")
    tokens = np.arange(LENGTH) % VOCAB
    for part in ("self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
        spoilt = {key: tensor.clone() for key, tensor in clean.items()}
        spoilt[f"model.layers.2.{part}.weight"][5] = 3e38
        write(spoilt, tmp_path)
        runner = load(tmp_path, variant=variant, kv_dtype=kv_dtype)
        logits = run(runner, chunk(tokens, 0, LENGTH, blocks_for(runner, 1)[0]))
        assert logits[-1].isnan().all(), part
