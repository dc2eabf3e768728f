"""instructor: JSON_SCHEMA mode for structured output, PARALLEL_TOOLS for tool calls."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import instructor
import openai
from driver import Book, Calls, GetWeather, carry_out_tasks


class get_weather(GetWeather):  # the tool gets the class's name
    __doc__ = GetWeather.__doc__


class Instructor:
    def __init__(self, url: str, model: str) -> None:
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.model = model

    def create(self, mode: instructor.Mode, max_tokens: int, **arguments: Any) -> Any:
        client = instructor.from_openai(self.openai, mode=mode)
        settings = {"model": self.model, "temperature": 0, "max_tokens": max_tokens}
        return client.chat.completions.create(max_retries=0, **settings, **arguments)

    def text(self, prompt: str, max_tokens: int) -> str:
        messages = [{"role": "user", "content": prompt}]
        answer = self.create(
            instructor.Mode.TOOLS, max_tokens, messages=messages, response_model=None
        )
        return answer.choices[0].message.content

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        messages = [{"role": "user", "content": prompt}]
        chunks = self.create(
            instructor.Mode.TOOLS, max_tokens, messages=messages, response_model=None, stream=True
        )
        return [chunk.choices[0].delta.content or "" for chunk in chunks]

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        book = self.create(
            instructor.Mode.JSON_SCHEMA, max_tokens, messages=messages, response_model=Book
        )
        return book.model_dump()

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        asked = self.create(
            instructor.Mode.PARALLEL_TOOLS,
            max_tokens,
            messages=list(messages),
            response_model=Iterable[get_weather],
        )
        calls = [{"name": type(call).__name__, "arguments": call.model_dump()} for call in asked]
        message = asked._raw_response.choices[0].message
        ids = [call.id for call in message.tool_calls]
        messages += [
            message,
            *({"role": "tool", "tool_call_id": i, "content": weather} for i in ids),
        ]
        answer = self.create(
            instructor.Mode.TOOLS, max_tokens, messages=messages, response_model=None
        )
        return calls, answer.choices[0].message.content


carry_out_tasks(Instructor(*sys.argv[1:]))
