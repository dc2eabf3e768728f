from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine.request import NO_ADVICE, SamplingDefaults
from engine.text.generation_config import GenerationConfig, read_generation_config


def read(folder: Path, values: dict[str, Any]) -> GenerationConfig:
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return read_generation_config(folder)


def test_no_file(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == GenerationConfig((), NO_ADVICE)


@pytest.mark.parametrize(("given", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_tokens(tmp_path: Path, given: Any, ids: tuple[int, ...]) -> None:
    assert read(tmp_path, {"eos_token_id": given}).eos_ids == ids


def test_sampling(tmp_path: Path) -> None:
    values = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    expected = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    assert read(tmp_path, values).sampling == expected
    assert read(tmp_path, {"top_k": -1}).sampling == SamplingDefaults(top_k=0)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 9), ("top_p", "0.5"), ("top_k", True), ("min_p", -0.1)]
)
def test_nonsense_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, {name: value}).sampling == NO_ADVICE
    assert name in caplog.text
