from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.fault_table import NOTE, render

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests run beside each other: threads of one that wait for a core would hold up all of its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-table", action="store_true", help="print what clients saw of each fault"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real models run one at a time, or a small machine would hold several in memory."""
    for item in items:
        if item.get_closest_marker("real") is not None:
            item.add_marker(pytest.mark.xdist_group("real"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.getoption("--fault-table"):
        reports = terminalreporter.stats.get("passed", [])
        properties = [entry for report in reports for entry in report.user_properties]
        terminalreporter.section("faults")
        terminalreporter.write_line(render(row for name, row in properties if name == NOTE))


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
