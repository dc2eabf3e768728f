"""What the native decoder refuses: each index of a step, and weights it could not keep."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.kernels import load_native, native_available
from engine.models.cpu_runner import CpuRunner, _layer_weights, _top_weights
from engine.models.decoder_spec import DecoderSpec, decoder_spec
from engine.models.packing import PackedWeights, packed_weights
from engine.models.source import ModelFiles
from engine.plan import StepPlan, pack
from tests.models.test_cpu_runner import FAMILIES, VOCAB, blocks_for, chunk, load, save_random_model

pytestmark = pytest.mark.skipif(native_available() is not None, reason=str(native_available()))

Arrays = dict[str, Any]
INT32_MAX = 2**31 - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_random_model(FAMILIES["llama"](), folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def runner(folder: Path) -> CpuRunner:
    return load(folder)


@pytest.fixture
def step(runner: CpuRunner) -> Arrays:
    """Two chunks of 6 and 5 tokens, three rows of logits."""
    tokens = np.arange(11)
    blocks = blocks_for(runner, 2)
    plan = StepPlan((chunk(tokens, 0, 6, blocks[0][:2], 4), chunk(tokens, 0, 5, blocks[1][:2], 4)))
    arrays = asdict(pack(plan, runner.block_size))
    return arrays | {"logits": np.full((3, VOCAB), np.nan, np.float32)}


def forward(runner: CpuRunner, step: Arrays) -> np.ndarray:
    runner._decoder.forward(**step)
    return step["logits"]


def test_the_step_is_computed_as_it_is(runner: CpuRunner, step: Arrays) -> None:
    assert np.isfinite(forward(runner, step)).all()


def put(name: str, index: int, value: int) -> Callable[[Arrays], None]:
    def change(step: Arrays) -> None:
        step[name].flat[index] = value

    return change


def wanted(*rows: int) -> Callable[[Arrays], None]:
    def change(step: Arrays) -> None:
        step["logit_rows"] = np.array(rows, np.int32)
        step["logits"] = np.empty((len(rows), VOCAB), np.float32)

    return change


def share_a_block(step: Arrays) -> None:
    """Both slices write to the first one's blocks."""
    step["block_tables"][1] = step["block_tables"][0]
    step["slots"][6:] = step["slots"][:5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("token_ids", 3, -1), "token id out of range"),
        (put("token_ids", 3, VOCAB), "token id out of range"),
        (put("positions", 0, -1), "a position lies outside its slice's context"),
        (put("positions", 10, 5), "a position lies outside its slice's context"),
        (put("positions", 2, 1), "the positions of a slice must follow each other"),
        (put("positions", 7, 2), "the positions of a slice must follow each other"),
        (put("slots", 4, -1), "a KV slot is not its position's in block_tables"),
        (put("slots", 4, 1 << 40), "a KV slot is not its position's in block_tables"),
        (put("slots", 4, 0), "a KV slot is not its position's in block_tables"),
        (share_a_block, "two tokens have one KV slot"),
        (put("query_starts", 0, 1), "query_starts must begin with 0"),
        (put("query_starts", 1, 0), "a slice needs at least one token of the step"),
        (put("query_starts", 1, -7), "a slice needs at least one token of the step"),
        (put("query_starts", 1, INT32_MAX), "a slice needs at least one token of the step"),
        (put("query_starts", 2, 12), "query_starts must end with the tokens"),
        (put("context_lens", 0, 5), "a position lies outside its slice's context"),
        (put("context_lens", 0, -5), "a position lies outside its slice's context"),
        (put("context_lens", 0, INT32_MAX), "block_tables is too narrow for context_lens"),
        (put("block_tables", 1, -1), "KV block out of range"),
        (put("block_tables", 1, INT32_MAX), "KV block out of range"),
        (wanted(-1), "a logit row lies outside the step"),
        (wanted(11), "a logit row lies outside the step"),
        (wanted(5, 5), "logit_rows must ascend"),
        (wanted(5, 4), "logit_rows must ascend"),
        (wanted(*[10] * 4096), "logit_rows must ascend"),
    ],
)
def test_a_wrong_index_is_refused(
    runner: CpuRunner, step: Arrays, change: Callable[[Arrays], None], message: str
) -> None:
    change(step)
    with pytest.raises(ValueError, match=message):
        forward(runner, step)


@pytest.mark.parametrize("name", ["token_ids", "positions", "slots", "logit_rows"])
def test_unaligned_arrays_are_refused(runner: CpuRunner, step: Arrays, name: str) -> None:
    array = step[name]
    memory = np.zeros(array.nbytes + 1, np.uint8)
    memory[1:] = array.view(np.uint8)
    step[name] = memory[1:].view(array.dtype)
    with pytest.raises(ValueError, match=f"{name} must be aligned"):
        forward(runner, step)


@pytest.mark.parametrize("kind", ["float64", "strided"])
def test_results_are_never_written_to_a_copy(runner: CpuRunner, step: Arrays, kind: str) -> None:
    logits = step["logits"]
    step["logits"] = logits.astype(np.float64) if kind == "float64" else np.asfortranarray(logits)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        forward(runner, step)


@pytest.fixture
def spec() -> DecoderSpec:
    return decoder_spec(FAMILIES["llama"]().to_dict())


@pytest.fixture
def weights(folder: Path, spec: DecoderSpec) -> PackedWeights:
    return packed_weights(ModelFiles("tiny", "tiny", folder), spec, "none", 1)


def decoder(
    spec: DecoderSpec, weights: PackedWeights, convert: Callable[[Any], Any], **extra: Any
) -> Any:
    """A decoder whose norms `convert` has changed, and which alone holds what it was given."""
    native = load_native()

    def converted(parts: dict[str, Any]) -> dict[str, Any]:
        return {n: convert(p) if isinstance(p, np.ndarray) else p for n, p in parts.items()}

    return native.Decoder(
        native.ThreadPool(1),
        "",
        spec.native_shape() | extra.pop("shape", {}),
        converted(_top_weights(spec, weights)),
        [converted(_layer_weights(spec, weights, index)) for index in range(len(spec.layers))],
        **{"block_size": 4, "num_blocks": 64, "kv_type": native.KvType.F32} | extra,
    )


def test_weights_live_as_long_as_the_decoder(
    spec: DecoderSpec, weights: PackedWeights, runner: CpuRunner, step: Arrays
) -> None:
    expected = forward(runner, step).copy()
    own = decoder(spec, weights, np.copy)
    gc.collect()
    rubbish = [np.full(spec.hidden, np.nan, np.float32) for _ in range(1000)]
    offsets = step["slots"] % 4
    owner = np.repeat([0, 1], [6, 5])
    step["block_tables"] = np.array([[3, 9], [11, 5]], np.int32)
    blocks = step["block_tables"][owner, step["positions"] // 4].astype(np.int64)
    step["slots"] = blocks * 4 + offsets
    own.forward(**step)
    np.testing.assert_array_equal(step["logits"], expected)
    del rubbish


@pytest.mark.parametrize(
    "convert",
    [lambda v: v.astype(np.float64), lambda v: v.astype(np.float16), lambda v: v.tolist()],
    ids=["float64", "float16", "list"],
)
def test_weights_that_only_a_copy_could_hold_are_refused(
    spec: DecoderSpec, weights: PackedWeights, convert: Callable[[Any], Any]
) -> None:
    with pytest.raises(ValueError, match="norm must be float32, in one piece"):
        decoder(spec, weights, convert)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"block_size": 0}, "KV block size is out of range"),
        ({"block_size": INT32_MAX}, "KV block size is out of range"),
        ({"num_blocks": 0}, "needs at least one block"),
        ({"num_blocks": INT32_MAX, "block_size": 1 << 16}, "KV cache is too large"),
        ({"shape": {"heads": 1 << 30, "kv_heads": 1 << 30}}, "too many or too large"),
    ],
)
def test_sizes_out_of_range_are_refused(
    spec: DecoderSpec, weights: PackedWeights, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decoder(spec, weights, lambda vector: vector, **extra)


def test_a_number_that_is_no_kv_type_is_refused(spec: DecoderSpec, weights: PackedWeights) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        decoder(spec, weights, lambda vector: vector, kv_type=2)
