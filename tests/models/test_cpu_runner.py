"""The native decoder against transformers' own forward, and against itself in other company."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from engine.cache import digests
from engine.config import Quantization
from engine.kernels import load_native, native_available
from engine.models import packing
from engine.models.architectures import ARCHITECTURES
from engine.models.cpu_runner import CpuRunner
from engine.models.decoder_spec import decoder_spec
from engine.models.packing import packed_weights
from engine.models.runner import KvBudget, UnsupportedModelError
from engine.models.source import ModelFiles
from engine.plan import Chunk, StepPlan

pytestmark = pytest.mark.skipif(native_available() is not None, reason=str(native_available()))
VARIANTS = [] if native_available() else load_native().variants()

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 7},
    "qwen3": {"head_dim": 32},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
    },
}
"""What makes a tiny model show more of an architecture than its defaults do."""


def tiny_config(architecture: str) -> tf.PreTrainedConfig:
    return tf.AutoConfig.for_model(architecture, **SHAPE, **OPTIONS.get(architecture, {}))


FAMILIES: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    **{architecture: partial(tiny_config, architecture) for architecture in ARCHITECTURES},
    "llama with biases and an untied head": lambda: tf.LlamaConfig(
        **(SHAPE | {"num_key_value_heads": 4}),
        tie_word_embeddings=False,
        head_dim=24,
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama with llama3 rope": lambda: tf.LlamaConfig(**SHAPE, rope_parameters=dict(LLAMA3_ROPE)),
    "llama with linear rope": lambda: tf.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    ),
    "qwen2 with windows in its upper layers": lambda: tf.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
}


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def save_random_model(config: tf.PreTrainedConfig, folder: Path) -> torch.nn.Module:
    """Every parameter random, norms and biases too, so that none can be left out unnoticed."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model.eval()


def load(
    folder: Path,
    quantization: Quantization = "none",
    *,
    block_size: int = 4,
    threads: int = 2,
    variant: str = "",
    kv_dtype: str = "float32",
) -> CpuRunner:
    budget = KvBudget(block_size, memory_bytes=8 << 20, max_requests=16)
    return CpuRunner.load(
        ModelFiles("tiny", "tiny", folder),
        budget=budget,
        quantization=quantization,
        threads=threads,
        variant=variant,
        kv_dtype=kv_dtype,
    )


def blocks_for(runner: CpuRunner, requests: int, seed: int = 0) -> list[tuple[int, ...]]:
    """A random share of the pool for each request."""
    order = np.random.default_rng(seed).permutation(runner.num_blocks).tolist()
    share = len(order) // requests
    return [tuple(order[i * share : (i + 1) * share]) for i in range(requests)]


def chunk(
    tokens: np.ndarray, start: int, end: int, blocks: tuple[int, ...], first_logit: int = 0
) -> Chunk:
    return Chunk("r", start, tokens[start:end].astype(np.int32), blocks, first_logit=first_logit)


def run(runner: CpuRunner, *chunks: Chunk) -> torch.Tensor:
    return runner.execute(StepPlan(chunks)).clone()


def in_chunks(
    runner: CpuRunner, tokens: np.ndarray, ends: Sequence[int], blocks: tuple[int, ...]
) -> torch.Tensor:
    """Logits of every position, computed up to each end in turn."""
    starts = [0, *ends[:-1]]
    return torch.cat(
        [run(runner, chunk(tokens, a, b, blocks)) for a, b in zip(starts, ends, strict=True)]
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_steps_equal_transformers(family: str, variant: str, tmp_path: Path) -> None:
    model = save_random_model(FAMILIES[family](), tmp_path)
    runner = load(tmp_path, variant=variant)
    rng = np.random.default_rng(4)
    a, b, c = (rng.integers(0, VOCAB, length) for length in (150, 11, 23))
    blocks = blocks_for(runner, 3)
    run(runner, chunk(b, 0, 6, blocks[1], 6), chunk(a, 0, 140, blocks[0], 140))
    spoilt = np.where(np.arange(23) >= 18, (c + 1) % VOCAB, c)
    run(runner, chunk(spoilt, 0, 23, blocks[2], 23), chunk(b, 6, 7, blocks[1], 1))
    logits = run(
        runner,
        chunk(a, 140, 150, blocks[0], 4),
        chunk(b, 7, 11, blocks[1], 0),
        chunk(c, 18, 23, blocks[2], 4),  # rejected draft rows 18.. are overwritten
    )
    for tokens, rows in ((a, logits[:6]), (b, logits[6:10]), (c, logits[10:])):
        with torch.no_grad():
            whole = model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0]
        torch.testing.assert_close(rows, whole[-len(rows) :], atol=1e-3, rtol=1e-4)


def rounded_to_int8(weights: torch.Tensor) -> torch.Tensor:
    rows, cols = weights.shape
    groups = torch.nn.functional.pad(weights, (0, -cols % 32)).reshape(rows, -1, 32)
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    return ((groups / scales.clamp(min=1e-9)).round().clamp(-127, 127) * scales).reshape(rows, -1)[
        :, :cols
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_int8_is_near_the_forward_of_the_rounded_weights(family: str, tmp_path: Path) -> None:
    model = save_random_model(FAMILIES[family](), tmp_path)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 60)
    runner = load(tmp_path, "int8")
    logits = run(runner, chunk(tokens, 0, 60, blocks_for(runner, 1)[0]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(rounded_to_int8(parameter))
        expected = model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0]
    similarity = torch.nn.functional.cosine_similarity(logits, expected)
    assert similarity.min() > 0.995
    assert similarity.mean() > 0.999


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantization", ["int8", "int4", "none"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_a_row_has_the_same_bits_however_it_is_computed(
    variant: str, quantization: Quantization, family: str, tmp_path: Path
) -> None:
    save_random_model(FAMILIES[family](), tmp_path)
    length = 45
    tokens = np.random.default_rng(2).integers(0, VOCAB, length)
    runner = load(tmp_path, quantization, variant=variant)
    blocks = blocks_for(runner, 2)
    whole = in_chunks(runner, tokens, [length], blocks[0])
    assert torch.equal(in_chunks(runner, tokens, list(range(1, length + 1)), blocks[1]), whole)
    assert torch.equal(in_chunks(runner, tokens, [3, 20, 25, 29, length], blocks[0]), whole)
    for threads in (1, 3):
        other = load(tmp_path, quantization, variant=variant, threads=threads)
        assert torch.equal(in_chunks(other, tokens, [30, length], blocks_for(other, 1)[0]), whole)


def test_flat_logits_of_a_wide_vocabulary_have_the_same_bits_too(tmp_path: Path) -> None:
    config = tf.LlamaConfig(**(SHAPE | {"vocab_size": 5000, "initializer_range": 0.02}))
    save_random_model(config, tmp_path)
    tokens = np.random.default_rng(4).integers(0, 5000, 30)
    runner = load(tmp_path, "int8")
    blocks = blocks_for(runner, 2)
    whole = in_chunks(runner, tokens, [30], blocks[0])
    near = (whole >= whole.amax(1, keepdim=True) - 1.0).sum(1)
    assert near.float().mean() > 200, "not flat enough to reach the narrowest bound"
    assert torch.equal(in_chunks(runner, tokens, list(range(1, 31)), blocks[1]), whole)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_fifteen_neighbours_and_stale_drafts_change_no_bit(kv_dtype: str, tmp_path: Path) -> None:
    save_random_model(FAMILIES["qwen2"](), tmp_path)
    rng = np.random.default_rng(3)
    requests = [rng.integers(0, VOCAB, int(n)) for n in rng.integers(8, 60, 16)]
    alone = load(tmp_path, "int8", kv_dtype=kv_dtype)
    runner = load(tmp_path, "int8", kv_dtype=kv_dtype)
    blocks = blocks_for(runner, 16, seed=5)
    run(
        runner, *(chunk(t, 0, len(t) - 5, b, len(t)) for t, b in zip(requests, blocks, strict=True))
    )
    drafts = [np.where(np.arange(len(t)) >= len(t) - 3, 1, t) for t in requests]
    run(runner, *(chunk(d, len(d) - 5, len(d), b) for d, b in zip(drafts, blocks, strict=True)))
    logits = run(
        runner, *(chunk(t, len(t) - 4, len(t), b) for t, b in zip(requests, blocks, strict=True))
    ).split(4)
    for tokens, own, rows in zip(requests, reversed(blocks), logits, strict=True):
        assert torch.equal(run(alone, chunk(tokens, 0, len(tokens), own, len(tokens) - 4)), rows)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("head_is_large", [True, False])
def test_fast_weights_have_a_4_bit_head_where_it_is_large(
    family: str, head_is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FAMILIES[family]()
    save_random_model(config, tmp_path)
    size = config.vocab_size * config.hidden_size
    monkeypatch.setattr(packing, "_LARGE_HEAD", size if head_is_large else size + 1)
    files = ModelFiles("tiny", "tiny", tmp_path)
    spec = decoder_spec(config.to_dict())
    matrices = packed_weights(files, spec, "fast", 1).matrices
    formats = {name: matrix.format.name for name, matrix in matrices.items()}
    assert formats.pop("embedding") == "Q8_SYMMETRIC"
    head = formats.pop("head", None)
    assert (head == "Q4_SYMMETRIC") == head_is_large
    assert (head is None) == (spec.tied and not head_is_large)
    assert set(formats.values()) == {"Q4_SYMMETRIC"}
    runner = load(tmp_path, "fast")
    assert runner.info.num_parameters == load(tmp_path, "none").info.num_parameters
    tokens = np.random.default_rng(8).integers(0, VOCAB, 20)
    assert in_chunks(runner, tokens, [20], blocks_for(runner, 1)[0]).isfinite().all()


@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 48])
def test_block_size_changes_no_value(block_size: int, tmp_path: Path) -> None:
    save_random_model(FAMILIES["mistral"](), tmp_path)
    tokens = np.random.default_rng(6).integers(0, VOCAB, 70)
    reference = load(tmp_path, block_size=4)
    other = load(tmp_path, block_size=block_size)
    torch.testing.assert_close(
        in_chunks(other, tokens, [40, 70], blocks_for(other, 1)[0]),
        in_chunks(reference, tokens, [40, 70], blocks_for(reference, 1)[0]),
        atol=2e-4,
        rtol=1e-5,
    )


def test_bfloat16_kv_stays_close(tmp_path: Path) -> None:
    save_random_model(FAMILIES["llama"](), tmp_path)
    tokens = np.random.default_rng(7).integers(0, VOCAB, 50)
    exact, rounded = load(tmp_path), load(tmp_path, kv_dtype="bfloat16")
    assert rounded.info.kv_bytes_per_token * 2 == exact.info.kv_bytes_per_token
    rows = [in_chunks(r, tokens, [50], blocks_for(r, 1)[0]) for r in (exact, rounded)]
    assert not torch.equal(rows[0], rows[1])
    assert torch.nn.functional.cosine_similarity(*rows).min() > 0.999


def packed_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "packed").rglob("*.slip"))


def test_packed_weights_are_kept_and_reused(tmp_path: Path) -> None:
    save_random_model(FAMILIES["llama"](), tmp_path)
    tokens = np.arange(20)
    first = load(tmp_path, "int8")
    kept = packed_files(tmp_path)
    assert len(kept) == 1
    stamp = kept[0].stat().st_mtime_ns
    second = load(tmp_path, "int8")
    assert kept[0].stat().st_mtime_ns == stamp
    rows = [run(r, chunk(tokens, 0, 20, blocks_for(r, 1)[0])) for r in (first, second)]
    assert torch.equal(rows[0], rows[1])
    load(tmp_path, "int4")
    assert len(packed_files(tmp_path)) == 2


def test_a_warm_start_opens_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random_model(FAMILIES["llama"](), tmp_path)
    monkeypatch.setattr(digests, "_SETTLED_NS", -1)
    load(tmp_path, "int8")
    for function in (f"{digests.__name__}.digest_file", f"{packing.__name__}.open_weights"):
        monkeypatch.setattr(function, None)
    load(tmp_path, "int8")


def test_changed_weights_are_packed_anew(tmp_path: Path) -> None:
    """A checkpoint trained further that still begins as before in each tensor."""
    model: Any = save_random_model(FAMILIES["llama"](), tmp_path)
    tokens = np.random.default_rng(9).integers(0, VOCAB, 20)
    before = load(tmp_path)
    first_logits = run(before, chunk(tokens, 0, 20, blocks_for(before, 1)[0]))
    equal_bytes = 4096
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[equal_bytes // parameter.element_size() :].mul_(1.5)
    model.save_pretrained(tmp_path)
    after = load(tmp_path)
    assert len(packed_files(tmp_path)) == 2
    logits = run(after, chunk(tokens, 0, 20, blocks_for(after, 1)[0]))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
    assert not torch.allclose(logits, first_logits, atol=0.1)


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    save_random_model(FAMILIES["llama"](), tmp_path)
    spec = decoder_spec(tf.LlamaConfig(**SHAPE).to_dict())
    weights = packed_weights(ModelFiles("tiny", "tiny", tmp_path), spec, "none", 1)
    budget = KvBudget(4, memory_bytes=1 << 20, max_requests=1)
    with pytest.raises(UnsupportedModelError, match="number of layers"):
        CpuRunner(replace(spec, layers=()), weights, budget, kv_dtype="float32", threads=1)


def test_equal_weights_of_another_architecture_are_packed_anew(tmp_path: Path) -> None:
    """Gemma's norms are stored without the one that the decoder's have."""
    save_random_model(FAMILIES["llama"](), tmp_path)
    files = ModelFiles("tiny", "tiny", tmp_path)
    spec = decoder_spec(tf.LlamaConfig(**SHAPE).to_dict())
    plain = packed_weights(files, spec, "none", 1).vectors["final_norm"]
    spec = replace(spec, architecture=ARCHITECTURES["gemma3_text"])
    gemma = packed_weights(files, spec, "none", 1).vectors["final_norm"]
    np.testing.assert_array_equal(gemma, plain + np.float32(1))


_PACK_AT_THE_SAME_TIME = """
import logging, sys, time
from engine.models import packing
from tests.models.test_cpu_runner import load
from pathlib import Path

write = packing._write
def write_slowly(*arguments):
    print("packing", flush=True)
    time.sleep(1)
    write(*arguments)
packing._write = write_slowly
print("imported", flush=True)
sys.stdin.readline()
load(Path(sys.argv[1]), "int8")
"""


@pytest.mark.slow
def test_two_processes_pack_once(tmp_path: Path) -> None:
    save_random_model(FAMILIES["llama"](), tmp_path)
    command = [sys.executable, "-c", _PACK_AT_THE_SAME_TIME, str(tmp_path)]
    root = Path(__file__).parents[2]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=root,
                )
            )
            for _ in range(2)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "imported\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(outputs) == ["", "packing\n"]
    assert len(packed_files(tmp_path)) == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.GPT2Config(), "does not know the architecture gpt2"),
        (tf.LlamaConfig(**SHAPE, hidden_act="relu"), "activation relu"),
        (
            tf.LlamaConfig(
                **SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "RoPE 'dynamic'",
        ),
        (tf.Gemma3TextConfig(**SHAPE, final_logit_softcapping=30.0), "soft-capped logits"),
    ],
)
def test_what_it_can_not_compute_is_refused_with_a_reason(
    config: tf.PreTrainedConfig, reason: str
) -> None:
    assert reason in str(CpuRunner.supports(config.to_dict()))


def test_what_it_can_compute_has_no_reason() -> None:
    for family in FAMILIES.values():
        assert CpuRunner.supports(family().to_dict()) is None


def test_a_tensor_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_random_model(FAMILIES["llama"](), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.sinks.weight"] = torch.ones(4)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn\.sinks\.weight"):
        load(tmp_path)
