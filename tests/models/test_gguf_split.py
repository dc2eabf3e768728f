"""A model split into several GGUF files is one model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file

from engine.kernels import native_available
from engine.models.cpu_runner import CpuRunner
from engine.models.gguf import hf_folder, torch_folder
from engine.models.gguf_header import GgufError, read_header
from engine.models.runner import KvBudget
from engine.models.source import ModelFiles, ModelSourceError, resolve
from engine.plan import Chunk, StepPlan
from tests.models.test_gguf import read_json
from tests.models.tiny_gguf import write_tiny_gguf

PARTS = 4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(folder))
    return folder


def part(folder: Path, number: int) -> Path:
    return folder / f"tiny-Q8_0-{number:05}-of-{PARTS:05}.gguf"


@pytest.fixture
def whole(tmp_path: Path) -> ModelFiles:
    path = tmp_path / "whole.gguf"
    write_tiny_gguf(path)
    return resolve(str(path))


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """The folder they lie in."""
    folder = tmp_path / "parts"
    folder.mkdir()
    write_tiny_gguf(folder / "tiny-Q8_0.gguf", tensors_a_part=3)
    assert sorted(folder.iterdir()) == [part(folder, number) for number in range(1, PARTS + 1)]
    return folder


def test_every_part_stands_for_the_model(parts: Path) -> None:
    for number in range(1, PARTS + 1):
        files = resolve(str(part(parts, number)))
        assert files.name == "tiny"
        assert files.weights == part(parts, 1)
        assert files.weight_files == tuple(sorted(parts.iterdir()))


def test_header_has_all_tensors_and_where_they_lie(parts: Path) -> None:
    header = read_header(part(parts, 1))
    read = {
        path: {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        for path in sorted(parts.iterdir())
    }
    assert sum(len(tensors) for tensors in read.values()) == len(header.tensors) == 12
    for tensor in header.tensors:
        assert read[tensor.path][tensor.name].data_offset == tensor.offset


def test_configuration_and_weights_are_those_of_the_whole(parts: Path, whole: ModelFiles) -> None:
    split = resolve(str(part(parts, 1)))
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert read_json(hf_folder(split) / name) == read_json(hf_folder(whole) / name)
    assert read_json(hf_folder(split) / "config.json")["tie_word_embeddings"] is False
    weights = load_file(torch_folder(split) / "model.safetensors")
    expected = load_file(torch_folder(whole) / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)
    for folder in (hf_folder(split), torch_folder(split)):
        assert not list(folder.glob("*.gguf"))


@pytest.mark.skipif(native_available() is not None, reason=str(native_available()))
def test_native_runner_computes_the_same(parts: Path, whole: ModelFiles) -> None:
    chunk = Chunk("r", 0, np.arange(9, dtype=np.int32), (0,))
    rows = [
        CpuRunner.load(files, budget=KvBudget(16, memory_bytes=1 << 20, max_requests=1), threads=1)
        .execute(StepPlan((chunk,)))
        .numpy()
        .copy()
        for files in (resolve(str(part(parts, 2))), whole)
    ]
    np.testing.assert_array_equal(*rows)


def test_a_change_in_a_later_part_is_another_model(parts: Path) -> None:
    before = torch_folder(resolve(str(part(parts, 1))))
    data = bytearray(part(parts, 3).read_bytes())
    data[-5] ^= 1
    part(parts, 3).write_bytes(data)
    assert torch_folder(resolve(str(part(parts, 1)))) != before


@pytest.mark.parametrize("number", range(1, PARTS + 1))
def test_a_missing_part_is_named(parts: Path, number: int) -> None:
    part(parts, number).unlink()
    left = part(parts, 2 if number == 1 else 1)
    with pytest.raises(ModelSourceError, match=part(parts, number).name):
        resolve(str(left))


def test_a_cut_part_is_named(parts: Path) -> None:
    data = part(parts, 3).read_bytes()
    part(parts, 3).write_bytes(data[:-40])
    with pytest.raises(ModelSourceError, match=rf"{part(parts, 3).name}: .* cut short"):
        resolve(str(part(parts, 1)))


def test_parts_of_different_models_do_not_mix(parts: Path) -> None:
    shutil.copy(part(parts, 2), part(parts, 3))
    with pytest.raises(ModelSourceError, match=rf"{part(parts, 3).name}: .* part 3 of 4"):
        resolve(str(part(parts, 1)))


def test_a_renamed_part_is_told_how_parts_are_named(parts: Path) -> None:
    renamed = part(parts, 1).rename(parts / "model.gguf")
    with pytest.raises(GgufError, match=r"one of 4 parts .* NAME-00001-of-00004\.gguf"):
        read_header(renamed)
