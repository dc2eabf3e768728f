"""GGUF files with damage anywhere: an error or a model, never a crash or a hang."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import strategies as st

from engine.kernels import native_available
from engine.models.cpu_runner import CpuRunner
from engine.models.gguf import hf_folder
from engine.models.gguf_header import GgufError, read_header
from engine.models.runner import KvBudget, UnsupportedModelError
from engine.models.source import ModelFiles, ModelSourceError
from tests.fuzz.examples import fuzzed, short_and_long
from tests.models.tiny_gguf import write_tiny_gguf

HEADER_BYTES = 6_000
"""About the length of the tiny file's header; most damage goes there."""

_POSITIONS = st.integers(0, 120) | st.integers(0, HEADER_BYTES) | st.integers(0, 1 << 20)
_INTEGERS = st.sampled_from([0, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
_EDITS = st.one_of(
    st.tuples(st.just("byte"), _POSITIONS, st.integers(0, 255)),
    st.tuples(st.just("integer"), _POSITIONS, _INTEGERS),
    st.tuples(st.just("delete"), _POSITIONS, st.integers(1, 64)),
    st.tuples(st.just("repeat"), _POSITIONS, st.integers(1, 64)),
    st.tuples(st.just("cut"), _POSITIONS, st.just(0)),
)
MUTATIONS = st.lists(_EDITS, min_size=1, max_size=4)
KINDS = st.sampled_from(["gpt2", "llama"])


@functools.cache
def intact(kind: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        extra = {"general.alignment": 32, "split.count": 1}
        write_tiny_gguf(path, kind=kind, extra=extra)
        return path.read_bytes()


def damaged(kind: str, edits: list[tuple[str, int, int]]) -> bytes:
    data = bytearray(intact(kind))
    for kind_of_edit, place, value in edits:
        at = place % max(1, len(data))
        match kind_of_edit:
            case "byte":
                data[at : at + 1] = bytes([value])
            case "integer":
                data[at : at + 8] = value.to_bytes(8, "little")
            case "delete":
                del data[at : at + value]
            case "repeat":
                data[at:at] = data[at : at + value]
            case "cut":
                del data[at:]
    return bytes(data)


@fuzzed(quick=500, long=50_000, kind=KINDS, edits=MUTATIONS)
def test_damaged_headers(kind: str, edits: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.gguf"
        path.write_bytes(damaged(kind, edits))
        began = time.monotonic()
        try:
            read_header(path)
            refusal = f"{path}: none"
        except GgufError as error:
            refusal = str(error)
        assert time.monotonic() - began < 5
        assert refusal.startswith(f"{path}: ")
        assert "\n" not in refusal


@pytest.mark.skipif(native_available() is not None, reason="the native kernels are not built")
class TestWholeLoad:
    """Tokenizer, configuration, packing and decoder of a damaged file."""

    @staticmethod
    @fuzzed(quick=20, long=2_000, kind=KINDS, edits=MUTATIONS)
    def test_damaged_files(kind: str, edits: list[tuple[str, int, int]]) -> None:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLIPSTREAM_CACHE", f"{folder}/cache")
            path = Path(folder) / "damaged.gguf"
            path.write_bytes(damaged(kind, edits))
            files = ModelFiles("damaged", str(path), path)
            try:
                hf_folder(files)
                CpuRunner.load(files, budget=KvBudget(4, 1 << 20, max_requests=1), threads=1)
                refusal = "none"
            except (ModelSourceError, UnsupportedModelError, GgufError) as error:
                refusal = str(error)
            assert len(refusal.splitlines()) == 1


_PACKER = """
import json, mmap, sys
import numpy as np
from engine.kernels import load_native

native = load_native()
pool = native.ThreadPool(1)
outcomes = {"packed": 0, "refused": 0}


def aligned(size):
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8, size)


for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([1, 7, 16, 17, 32, 48, 256, rng.integers(0, 3)]))
    cols = int(rng.choice([32, 64, 256, 256, 512, 512, rng.integers(0, 40)]))
    kind = int(rng.choice([0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30, rng.integers(0, 40)]))
    try:
        if rng.random() < 0.5:
            size = native.gguf_row_bytes(kind, cols) * rows
            format_ = int(rng.choice([native.format_for_gguf(kind), 3, 7]))
            wrong = int(rng.choice([0, 0, 0, -1, 1, 64]))
            data = rng.integers(0, 256, max(0, size + wrong), np.uint8)
            out = aligned(native.packed_bytes(format_, rows, cols))
            heads = int(rng.choice([0, 0, 0, 0, 1, 2, 3]))
            native.pack_gguf(pool, kind, data, format_, rows, cols, heads, out)
        else:
            format_ = int(rng.choice([0, 1, 2, 3, 7, rng.integers(-1, 12)]))
            type_ = int(rng.integers(-1, 4))
            width = {0: 4}.get(type_, 2) + int(rng.choice([0, 0, 0, -1, 1]))
            data = rng.integers(0, 256, rows * cols * width, np.uint8)
            out = aligned(native.packed_bytes(format_, rows, cols))
            native.pack_floats(pool, type_, data, format_, rows, cols, out)
        matrix = native.PackedMatrix(format_, rows, cols, out)
        x = rng.normal(size=(3, cols)).astype(np.float32)
        native.linear(pool, "", matrix, x, np.empty((3, rows), np.float32))
        matrix.dequantize(0, np.empty((rows, cols), np.float32))
        outcomes["packed"] += 1
    except (ValueError, TypeError, OverflowError):
        outcomes["refused"] += 1
print(json.dumps(outcomes))
"""


@pytest.mark.skipif(native_available() is not None, reason="the native kernels are not built")
@short_and_long(1_000, 100_000)
def test_native_packer_survives_any_tensor(num_examples: int) -> None:
    """In a process of its own, which a crash would end."""
    run = subprocess.run(
        [sys.executable, "-c", _PACKER, "0", str(num_examples)],
        capture_output=True,
        text=True,
        timeout=3000,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    outcomes = json.loads(run.stdout)
    assert sum(outcomes.values()) == num_examples
    assert min(outcomes.values()) > num_examples // 20
