"""anthropic on /v1/messages."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from driver import Book, Calls, GetWeather, carry_out_tasks

GET_WEATHER = {
    "name": "get_weather",
    "description": GetWeather.__doc__,
    "input_schema": GetWeather.model_json_schema(),
}


class Messages:
    def __init__(self, url: str, model: str) -> None:
        self.messages = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0).messages
        self.model = model

    def settings(self, max_tokens: int) -> dict[str, Any]:
        # The client has no argument for the temperature any more.
        greedy = {"temperature": 0}
        return {"model": self.model, "max_tokens": max_tokens, "extra_body": greedy}

    def text(self, prompt: str, max_tokens: int) -> str:
        messages = [{"role": "user", "content": prompt}]
        return self.messages.create(messages=messages, **self.settings(max_tokens)).content[0].text

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        messages = [{"role": "user", "content": prompt}]
        with self.messages.stream(messages=messages, **self.settings(max_tokens)) as stream:
            return list(stream.text_stream)

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        answer = self.messages.parse(
            messages=messages, output_format=Book, **self.settings(max_tokens)
        )
        return answer.parsed_output.model_dump()

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        settings = {"tools": [GET_WEATHER], **self.settings(max_tokens)}
        asked = self.messages.create(messages=messages, **settings)
        uses = [block for block in asked.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": weather} for use in uses
        ]
        messages += [
            {"role": "assistant", "content": asked.content},
            {"role": "user", "content": results},
        ]
        answer = self.messages.create(messages=messages, **settings)
        return [{"name": use.name, "arguments": use.input} for use in uses], answer.content[0].text


carry_out_tasks(Messages(*sys.argv[1:]))
