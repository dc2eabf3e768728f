"""guidance's OpenAI model. It sends no temperature of 0: a top_p of 0 is as greedy."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

import guidance
from driver import Book, Calls, carry_out_tasks, weather_tool
from guidance import assistant, gen, user
from guidance.models import OpenAI

TURN, END = "<|im_start|>assistant\n", "\n<|im_end|>\n"
"""Around an answer where a conversation is written out."""


@guidance.guidance
def answered(conversation: OpenAI, max_tokens: int) -> OpenAI:
    with assistant():
        conversation += gen("answer", max_tokens=max_tokens)
    return conversation


class Guidance:
    def __init__(self, url: str, model: str) -> None:
        self.model = OpenAI(
            model,
            sampling_params={"top_p": 0.0},
            echo=False,
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
        )

    def asked(self, prompt: str) -> OpenAI:
        with user():
            return self.model + prompt

    def text(self, prompt: str, max_tokens: int) -> str:
        return (self.asked(prompt) + answered(max_tokens))["answer"]

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        states = self.asked(prompt).stream() + answered(max_tokens)
        texts = ["", *(str(state).partition(TURN)[2].removesuffix(END) for state in states)]
        return [later.removeprefix(earlier) for earlier, later in pairwise(texts)]

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        conversation = self.asked(prompt)
        with assistant():
            answer = conversation + guidance.json("book", schema=Book, max_tokens=max_tokens)
        return json.loads(answer["book"])

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        get_weather, calls = weather_tool(weather)
        conversation = self.asked(prompt)
        with assistant():
            conversation += gen(tools=[get_weather])
        return calls, (conversation + answered(max_tokens))["answer"]


carry_out_tasks(Guidance(*sys.argv[1:]))
