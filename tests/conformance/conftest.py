from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.served import Served, served, tiny_flags
from tests.real.models import QWEN_CODER_15B, SMOLLM2_FILE, model_file

TOOL_TEMPLATE = Path(__file__).parent / "tools.jinja"


@pytest.fixture(scope="package")
def tiny(tiny_model_dir: Path, tiny_draft_dir: Path) -> Iterator[Served]:
    with served(*tiny_flags(tiny_model_dir, tiny_draft_dir)) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="package")
def smollm2_with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SmolLM2 knows no tools; a template that has a place for them makes it a model that does."""
    model = tmp_path_factory.mktemp("smollm2") / "smollm2.gguf"
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force"]
    command += ["--chat-template", TOOL_TEMPLATE.read_text()]
    subprocess.run([*command, model_file(SMOLLM2_FILE), str(model)], check=True)
    flags = ["--model", str(model), "--served-names", "smollm2", "--max-context", "2048"]
    with served(*flags, "--kv.memory-mib", "256", "--threads", "1") as server:
        server.wait_until_ready()
        yield server
    model.unlink()


@pytest.fixture(scope="package")
def coder() -> Iterator[Served]:
    """Qwen2.5-Coder-1.5B, with a draft of another tokenizer."""
    flags = ["--model", model_file(QWEN_CODER_15B), "--draft", model_file(SMOLLM2_FILE)]
    flags += ["--served-name", "coder", "--max-context", "4096"]
    with served(*flags, "--kv.memory-mib", "512", "--kv.draft-memory-mib", "128") as server:
        server.wait_until_ready()
        yield server
