"""NaNs that one request leaves in the KV cache never reach another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

from engine.kernels import native_available
from engine.models.cpu_runner import CpuRunner
from engine.models.runner import KvBudget, ModelRunner
from engine.models.source import ModelFiles
from engine.models.torch_runner import TorchRunner
from engine.plan import Chunk, StepPlan

POISON = 7
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding of one token is no number."""
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
    path = tmp_path_factory.mktemp("poisoned")
    model.save_pretrained(path)
    return path


def load(kind: str, folder: Path) -> ModelRunner:
    budget = KvBudget(BLOCK_SIZE, memory_bytes=8 << 20, max_requests=4, max_context=64)
    if kind == "torch":
        return TorchRunner.load(
            folder, device=torch.device("cpu"), dtype=torch.float32, budget=budget
        )
    files = ModelFiles("poisoned", "poisoned", folder)
    return CpuRunner.load(files, budget=budget, quantization="none", threads=1)


def chunk(tokens: list[int], start: int, end: int, blocks: list[int]) -> Chunk:
    return Chunk("r", start, np.asarray(tokens[start:end], np.int32), tuple(blocks))


@pytest.mark.parametrize(
    "kind",
    [
        "torch",
        pytest.param(
            "native", marks=pytest.mark.skipif(native_available() is not None, reason="not built")
        ),
    ],
)
def test_stale_nans_do_not_reach_another_request(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    clean, stained = load(kind, folder), load(kind, folder)
    num_slots = stained.num_blocks * BLOCK_SIZE
    poison = [POISON] * num_slots
    for first in range(0, stained.num_blocks, 16):
        blocks = list(range(first, min(first + 16, stained.num_blocks)))
        logits = stained.execute(StepPlan((chunk(poison, 0, 4 * len(blocks), blocks),)))
        assert logits.isnan().all(), "the whole cache is stained"
    a = [int(t) for t in np.random.default_rng(1).integers(8, 64, 30)]
    b = [int(t) for t in np.random.default_rng(2).integers(8, 64, 30)]
    steps = [
        (chunk(a, 0, 5, [3, 1]), chunk(b, 0, 7, [2, 6])),
        (chunk(a, 5, 6, [3, 1]), chunk(b, 7, 8, [2, 6])),
        (chunk(a, 6, 7, [3, 1]), chunk(b, 8, 11, [2, 6, 0])),
        (chunk(a, 7, 29, [3, 1, 4, 5, 8, 9, 10, 11]), chunk(b, 11, 12, [2, 6, 0])),
    ]
    for chunks in steps:
        expected = clean.execute(StepPlan(chunks)).clone()
        assert torch.equal(stained.execute(StepPlan(chunks)), expected)
        assert expected.isfinite().all()
