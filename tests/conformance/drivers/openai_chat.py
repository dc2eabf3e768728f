"""openai on /v1/chat/completions."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from driver import Book, Calls, GetWeather, carry_out_tasks


class Chat:
    def __init__(self, url: str, model: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.completions = client.chat.completions
        self.model = model

    def settings(self, max_tokens: int) -> dict[str, Any]:
        return {"model": self.model, "temperature": 0, "max_completion_tokens": max_tokens}

    def text(self, prompt: str, max_tokens: int) -> str:
        messages = [{"role": "user", "content": prompt}]
        answer = self.completions.create(messages=messages, **self.settings(max_tokens))
        return answer.choices[0].message.content

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        messages = [{"role": "user", "content": prompt}]
        with self.completions.stream(messages=messages, **self.settings(max_tokens)) as events:
            return [event.delta for event in events if event.type == "content.delta"]

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        answer = self.completions.parse(
            messages=messages, response_format=Book, **self.settings(max_tokens)
        )
        return answer.choices[0].message.parsed.model_dump()

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
        messages: list[Any] = [{"role": "user", "content": prompt}]
        settings = {"tools": [tool], **self.settings(max_tokens)}
        asked = self.completions.create(messages=messages, **settings).choices[0].message
        messages.append(asked)
        calls = []
        for call in asked.tool_calls or []:
            arguments = json.loads(call.function.arguments)
            calls.append({"name": call.function.name, "arguments": arguments})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": weather})
        answer = self.completions.create(messages=messages, **settings)
        return calls, answer.choices[0].message.content


carry_out_tasks(Chat(*sys.argv[1:]))
