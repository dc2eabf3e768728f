"""Damaged weights in the native runner end in the error, never in finite garbage."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.build import load_parts
from engine.config import Quantization
from engine.kernels import native_available
from engine.models.cpu_runner import CpuRunner
from engine.models.runner import KvBudget
from engine.models.source import ModelFiles
from engine.serving.recovery import EngineBrokenError
from engine.verify import INVALID_LOGITS
from tests.e2e.faulty import Server, faulty_server, tiny_config
from tests.engine.helpers import byte_tokenizer, make_core, make_request

pytestmark = pytest.mark.skipif(native_available() is not None, reason=str(native_available()))
RARE = "~"
"""A token that the tiny model's language lacks, so that nobody's answer has it either."""


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def damaged(model: Path, folder: Path, name: str, row: int, column: int, value: float) -> Path:
    """A copy of a model with one spoilt weight, and a head apart from the embedding."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[name][row, column] = value
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    "part", ["self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
)
@pytest.mark.parametrize("row", [0, 13])
def test_one_damaged_row_ends_the_request_in_the_error(
    tiny_model_dir: Path, tmp_path: Path, part: str, row: int, quantization: Quantization
) -> None:
    name = f"model.layers.1.{part}.weight"
    folder = damaged(tiny_model_dir, tmp_path / "model", name, row, 2 * row, math.nan)
    runner = CpuRunner.load(
        ModelFiles("tiny", "tiny", folder),
        budget=KvBudget(4, memory_bytes=4 << 20, max_requests=4),
        threads=1,
        quantization=quantization,
    )
    tokenizer = byte_tokenizer(runner.info.vocab_size)
    core = make_core(runner, tokenizer=tokenizer)
    core.add(make_request(range(9), "a"))
    with pytest.raises(EngineBrokenError, match="invalid logits") as caught:
        core.step()
    assert [output.error for output in caught.value.outputs] == [INVALID_LOGITS]
    with pytest.raises(EngineBrokenError, match="weights are damaged"):
        make_core(runner, tokenizer=tokenizer).warm_up()


@pytest.fixture
def server_with_a_damaged_token(
    tiny_model_dir: Path, tiny_draft_dir: Path, tmp_path: Path
) -> Iterator[Server]:
    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    name = "model.embed_tokens.weight"
    folder = damaged(
        tiny_model_dir, tmp_path / "model", name, tokenizer.token_to_id(RARE), 3, math.nan
    )
    with faulty_server(load_parts(tiny_config(str(folder), str(tiny_draft_dir)))) as server:
        yield server


def test_a_damaged_embedding_ends_the_requests_that_use_it(
    server_with_a_damaged_token: Server,
) -> None:
    server = server_with_a_damaged_token
    expected = server.text(max_tokens=24)
    for fields in ({"temperature": 0}, {"temperature": 1.0, "seed": 4}):
        answer = server.post(prompt=f"the cat {RARE} eats", **fields)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == INVALID_LOGITS
    with server.stream(prompt=f"{RARE} the cat") as chunks:
        assert list(chunks)[-1]["error"]["message"] == INVALID_LOGITS
    assert server.text(max_tokens=24) == expected
    assert expected
    assert server.health() == (200, "ok")
