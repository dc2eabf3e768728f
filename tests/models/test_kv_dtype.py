"""`kv.dtype`: what keys and values are kept in, by each runner."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.build import load_parts
from engine.config import Config, ConfigError, KvConfig
from engine.kernels import native_available

native = pytest.mark.skipif(native_available() is not None, reason="no native kernels")


def config(model: Path, dtype: str, runner: str) -> Config:
    kv = KvConfig(dtype=dtype, memory_mib=1, block_size=16)
    return Config(model=str(model), runner=runner, kv=kv, threads=1)


def kv_bytes(model: Path, dtype: str, runner: str) -> int:
    return load_parts(config(model, dtype, runner)).target.info.kv_bytes_per_token


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


@native
def test_the_native_runner_keeps_half_the_bytes_in_bfloat16(tiny_model_dir: Path) -> None:
    whole = kv_bytes(tiny_model_dir, "float32", "native")
    assert kv_bytes(tiny_model_dir, "auto", "native") == whole
    assert kv_bytes(tiny_model_dir, "bfloat16", "native") == whole // 2


def test_torch_keeps_what_it_computes(tiny_model_dir: Path) -> None:
    whole = kv_bytes(tiny_model_dir, "float32", "torch")
    assert kv_bytes(tiny_model_dir, "auto", "torch") == whole


def test_torch_can_not_keep_another(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"^kv.dtype: .* in float32 .* not in bfloat16$"):
        load_parts(config(tiny_model_dir, "bfloat16", "torch"))
