"""litellm's completion(), for an OpenAI-compatible server."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from driver import Book, Calls, GetWeather, carry_out_tasks

GET_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": GetWeather.__doc__,
        "parameters": GetWeather.model_json_schema(),
    },
}


class LiteLLM:
    def __init__(self, url: str, model: str) -> None:
        self.server = {"api_base": f"{url}/v1", "model": f"openai/{model}", "api_key": "none"}

    def complete(self, messages: list[Any], max_tokens: int, **arguments: Any) -> Any:
        settings = {"temperature": 0, "max_tokens": max_tokens, "num_retries": 0}
        return litellm.completion(messages=messages, **self.server, **settings, **arguments)

    def text(self, prompt: str, max_tokens: int) -> str:
        answer = self.complete([{"role": "user", "content": prompt}], max_tokens)
        return answer.choices[0].message.content

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        chunks = self.complete([{"role": "user", "content": prompt}], max_tokens, stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in chunks]

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        answer = self.complete(messages, max_tokens, response_format=Book)
        return Book.model_validate_json(answer.choices[0].message.content).model_dump()

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        asked = self.complete(messages, max_tokens, tools=[GET_WEATHER]).choices[0].message
        messages.append(asked)
        calls = []
        for call in asked.tool_calls or []:
            arguments = json.loads(call.function.arguments)
            calls.append({"name": call.function.name, "arguments": arguments})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": weather})
        answer = self.complete(messages, max_tokens, tools=[GET_WEATHER])
        return calls, answer.choices[0].message.content


carry_out_tasks(LiteLLM(*sys.argv[1:]))
