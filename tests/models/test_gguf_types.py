"""Every type of weights that the gguf package can unpack is served, natively and on torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import Quantization
from engine.kernels import native_available
from engine.models.cpu_runner import CpuRunner
from engine.models.decoder_spec import decoder_spec
from engine.models.gguf import hf_folder, torch_folder
from engine.models.packing import packed_weights
from engine.models.runner import KvBudget, ModelRunner, UnsupportedModelError
from engine.models.source import ModelFiles, ModelSourceError, resolve
from engine.models.torch_runner import TorchRunner
from engine.plan import Chunk, StepPlan
from tests.models.test_gguf import read_json
from tests.models.tiny_gguf import write_tiny_gguf

BUDGET = KvBudget(16, memory_bytes=4 << 20, max_requests=1)
EXACT = {
    "Q2_K": None,
    "Q3_K": "Q6_SUPER",
    "Q4_0": "Q4_SYMMETRIC",
    "Q4_1": "Q4_AFFINE",
    "Q4_K": "Q4_SUPER",
    "Q5_0": "Q8_SYMMETRIC",
    "Q5_1": "Q8_AFFINE",
    "Q5_K": "Q8_AFFINE",
    "Q6_K": "Q6_SUPER",
    "Q8_0": "Q8_SYMMETRIC",
    "IQ1_S": None,
    "IQ1_M": None,
    "IQ2_XXS": None,
    "IQ2_XS": None,
    "IQ2_S": None,
    "IQ3_XXS": None,
    "IQ3_S": None,
    "IQ4_NL": "Q4_TABLE",
    "IQ4_XS": "Q4_TABLE_SUPER",
    "TQ1_0": None,
    "TQ2_0": None,
    "MXFP4": None,
}
"""What holds each type's blocks exactly; None: nothing, they are unpacked."""


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def model(tmp_path: Path, quantization: str) -> ModelFiles:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, quantization=quantization)
    return resolve(str(path))


def logits(runner: ModelRunner) -> torch.Tensor:
    tokens = np.arange(40, 60, dtype=np.int32)
    blocks = (1, 0)
    return runner.execute(StepPlan((Chunk("r", 0, tokens, blocks),))).clone()


def native(files: ModelFiles, quantization: Quantization) -> CpuRunner:
    return CpuRunner.load(files, budget=BUDGET, threads=1, quantization=quantization)


def formats(files: ModelFiles, quantization: Quantization) -> set[str]:
    spec = decoder_spec(read_json(hf_folder(files) / "config.json"))
    weights = packed_weights(files, spec, quantization, 1)
    return {matrix.format.name for matrix in weights.matrices.values()}


@pytest.mark.skipif(native_available() is not None, reason=str(native_available()))
@pytest.mark.parametrize("quantization", EXACT)
def test_both_runners_serve_a_type_alike(tmp_path: Path, quantization: str) -> None:
    files = model(tmp_path, quantization)
    expected = logits(
        TorchRunner.load(
            torch_folder(files), device=torch.device("cpu"), dtype=torch.float32, budget=BUDGET
        )
    )
    assert expected.std() > 0
    exact = EXACT[quantization]
    assert formats(files, "none") == {exact or "F32"}
    assert formats(files, "auto") == {exact or "Q8_SYMMETRIC"}
    kinds: tuple[Quantization, ...] = ("none", "auto")
    for kind in kinds:
        own = logits(native(files, kind))
        if exact is None and kind == "none":
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
        else:  # 8-bit activations; in some rows that decides what these weights attend to
            assert torch.nn.functional.cosine_similarity(own, expected).median() > 0.99


def with_type(tmp_path: Path, number: int) -> Path:
    """A file that gives one tensor another type than it has."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, quantization="Q8_0")
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[at] == 8
    data[at] = number
    path.write_bytes(data)
    return path


def test_a_type_that_is_not_known_is_told_by_its_number(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"attn_q\.weight is of a type .* not known, 36"):
        resolve(str(with_type(tmp_path, 36)))


@pytest.mark.skipif(native_available() is not None, reason=str(native_available()))
def test_a_type_that_nobody_unpacks_is_named(tmp_path: Path) -> None:
    files = resolve(str(with_type(tmp_path, 24)))
    with pytest.raises(UnsupportedModelError, match=r"0\.q: .* type I8 can't be unpacked"):
        native(files, "auto")
    with pytest.raises(ModelSourceError, match="I8"):
        torch_folder(files)
