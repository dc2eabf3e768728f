"""openai on /v1/responses."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from driver import Book, Calls, GetWeather, carry_out_tasks


class Responses:
    def __init__(self, url: str, model: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.responses = client.responses
        self.model = model

    def settings(self, max_tokens: int) -> dict[str, Any]:
        return {"model": self.model, "temperature": 0, "max_output_tokens": max_tokens}

    def text(self, prompt: str, max_tokens: int) -> str:
        return self.responses.create(input=prompt, **self.settings(max_tokens)).output_text

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        with self.responses.stream(input=prompt, **self.settings(max_tokens)) as events:
            return [event.delta for event in events if event.type == "response.output_text.delta"]

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        answer = self.responses.parse(input=prompt, text_format=Book, **self.settings(max_tokens))
        return answer.output_parsed.model_dump()

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        schema = {**GetWeather.model_json_schema(), "additionalProperties": False}
        tool = {"type": "function", "name": "get_weather", "strict": True, "parameters": schema}
        settings = {"tools": [tool], **self.settings(max_tokens)}
        items: list[Any] = [{"role": "user", "content": prompt}]
        asked = self.responses.create(input=items, **settings)
        items += asked.output
        calls = []
        for item in asked.output:
            if item.type == "function_call":
                calls.append({"name": item.name, "arguments": json.loads(item.arguments)})
                output = {"type": "function_call_output", "output": weather}
                items.append({**output, "call_id": item.call_id})
        return calls, self.responses.create(input=items, **settings).output_text


carry_out_tasks(Responses(*sys.argv[1:]))
