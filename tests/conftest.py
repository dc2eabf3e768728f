from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-table", action="store_true", help="print what clients saw of each fault"
    )


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level tokenizer and a chat template."""
    from tests.tiny_models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller one, trained less, with a SentencePiece-style tokenizer and another template."""
    from tests.tiny_models import make_tiny_model

    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny-draft",
        style="sentencepiece",
        vocab_size=500,
        hidden=48,
        steps=90,
        seed=1,
    )


@pytest.fixture(scope="session")
def tiny_sibling_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weaker model with `tiny_model_dir`'s tokenizer."""
    from tests.tiny_models import make_tiny_model

    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny-sibling", hidden=32, steps=90, seed=2
    )
