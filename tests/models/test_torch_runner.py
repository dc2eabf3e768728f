"""The paged, packed forward against the model's own, over architectures and step shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

from engine.models.runner import KvBudget, UnsupportedModelError
from engine.models.torch_runner import TorchRunner, refuse_unsupported
from engine.plan import Chunk, StepPlan

BLOCK_SIZE = 4
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "llama": lambda: tf.LlamaConfig(**SHAPE),
    "llama with untied heads": lambda: tf.LlamaConfig(
        **(SHAPE | {"num_key_value_heads": 4}), tie_word_embeddings=False, head_dim=16
    ),
    "qwen2": lambda: tf.Qwen2Config(**SHAPE),
    "qwen3": lambda: tf.Qwen3Config(**SHAPE, head_dim=8),
    "mistral with a window": lambda: tf.MistralConfig(**SHAPE, sliding_window=7),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **SHAPE,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
        query_pre_attn_scalar=8,
    ),
}


def save_random_model(config: tf.PreTrainedConfig, folder: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(folder)
    return model.eval()


def load(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> TorchRunner:
    budget = KvBudget(BLOCK_SIZE, memory_bytes=1 << 20, max_requests=4, gpu_share=0.1)
    return TorchRunner.load(folder, device=torch.device(device), dtype=dtype, budget=budget)


def chunk(
    name: str, tokens: np.ndarray, start: int, end: int, blocks: tuple[int, ...], first_logit: int
) -> Chunk:
    return Chunk(name, start, tokens[start:end].astype(np.int32), blocks, first_logit=first_logit)


def mixed_steps(runner: TorchRunner) -> tuple[list[np.ndarray], dict[int, torch.Tensor]]:
    """Three requests in mixed steps; logits of the last steps' rows by request."""
    rng = np.random.default_rng(4)
    tokens = [rng.integers(0, 97, length) for length in (50, 11, 23)]
    order = rng.permutation(runner.num_blocks).tolist()
    blocks = [tuple(order[i * 13 : i * 13 + 13]) for i in range(3)]
    a, b, c = tokens
    # Request a in chunks of 40 (a slice that attends alone) beside verification rows of the others.
    runner.execute(
        StepPlan((chunk("b", b, 0, 6, blocks[1], 6), chunk("a", a, 0, 40, blocks[0], 40)))
    )
    spoilt = np.where(np.arange(23) >= 18, (c + 1) % 97, c)
    runner.execute(
        StepPlan((chunk("c", spoilt, 0, 23, blocks[2], 23), chunk("b", b, 6, 7, blocks[1], 1)))
    )
    # c's rejected draft rows 18.. are overwritten now.
    logits = runner.execute(
        StepPlan(
            (
                chunk("a", a, 40, 50, blocks[0], 4),
                chunk("b", b, 7, 11, blocks[1], 0),
                chunk("c", c, 18, 23, blocks[2], 4),
            )
        )
    ).clone()
    return tokens, {0: logits[:6], 1: logits[6:10], 2: logits[10:]}


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_packed_steps_equal_the_models_own_forward(family: str, tmp_path: Path) -> None:
    model = save_random_model(FAMILIES[family](), tmp_path)
    tokens, logits = mixed_steps(load(tmp_path))
    for index, rows in logits.items():
        with torch.no_grad():
            whole = model(input_ids=torch.tensor(tokens[index])[None], use_cache=False).logits[0]
        torch.testing.assert_close(rows, whole[-len(rows) :].float(), atol=2e-5, rtol=1e-4)


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    save_random_model(FAMILIES["qwen2"](), tmp_path)
    _, exact = mixed_steps(load(tmp_path))
    _, rounded = mixed_steps(load(tmp_path, torch.bfloat16))
    for index, rows in exact.items():
        assert rounded[index].dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(rows, rounded[index]).min() > 0.99


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_agrees_with_the_cpu(family: str, tmp_path: Path) -> None:
    save_random_model(FAMILIES[family](), tmp_path)
    _, on_cpu = mixed_steps(load(tmp_path))
    _, on_gpu = mixed_steps(load(tmp_path, device="cuda"))
    for index, rows in on_cpu.items():
        torch.testing.assert_close(on_gpu[index].cpu(), rows, atol=1e-3, rtol=1e-3)


def test_step_without_logits_returns_no_rows(tmp_path: Path) -> None:
    save_random_model(FAMILIES["llama"](), tmp_path)
    runner = load(tmp_path)
    plan = StepPlan((chunk("a", np.arange(8), 0, 8, (0, 1), 8),))
    assert runner.execute(plan).shape == (0, 97)


def test_kv_memory_is_what_the_budget_says(tmp_path: Path) -> None:
    save_random_model(FAMILIES["llama"](), tmp_path)
    runner = load(tmp_path)
    assert runner.info.kv_bytes_per_token == 2 * 3 * 2 * 8 * 4
    assert runner.num_blocks == 4 * 128 // BLOCK_SIZE  # four full contexts need no more
    small = KvBudget(BLOCK_SIZE, memory_bytes=10_000, max_requests=4)
    runner = TorchRunner.load(
        tmp_path, device=torch.device("cpu"), dtype=torch.float32, budget=small
    )
    assert runner.num_blocks == 10_000 // (BLOCK_SIZE * runner.info.kv_bytes_per_token)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (tf.MambaConfig(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
        (tf.T5Config(architectures=["T5ForConditionalGeneration"]), "T5ForConditionalGeneration"),
        (tf.ViTConfig(), "vit"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(
    config: tf.PreTrainedConfig, name: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        refuse_unsupported(config)


def test_soft_capped_attention_is_refused_at_load(tmp_path: Path) -> None:
    save_random_model(tf.Gemma2Config(**SHAPE, head_dim=8), tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"Gemma2ForCausalLM.*softcap"):
        load(tmp_path)
