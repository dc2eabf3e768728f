"""outlines, for a server that takes vLLM's `structured_outputs`. It knows no tools."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
import outlines
from driver import Book, carry_out_tasks


class Outlines:
    def __init__(self, url: str, model: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.model = outlines.from_vllm(client, model)

    def text(self, prompt: str, max_tokens: int) -> str:
        return self.model(prompt, temperature=0, max_tokens=max_tokens)

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        return list(self.model.stream(prompt, temperature=0, max_tokens=max_tokens))

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return json.loads(self.model(prompt, Book, temperature=0, max_tokens=max_tokens))


carry_out_tasks(Outlines(*sys.argv[1:]))
