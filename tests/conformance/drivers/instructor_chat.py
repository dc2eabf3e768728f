"""instructor: TOOLS mode for structured output, PARALLEL_TOOLS where the model may call or not."""

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

    def client(self, mode: instructor.Mode, max_tokens: int) -> instructor.Instructor:
        settings = {"temperature": 0, "max_tokens": max_tokens}
        return instructor.from_openai(self.openai, mode=mode, model=self.model, **settings)

    def text(self, prompt: str, max_tokens: int) -> str:
        messages = [{"role": "user", "content": prompt}]
        client = self.client(instructor.Mode.TOOLS, max_tokens)
        answer = client.create(max_retries=0, messages=messages, response_model=None)
        return answer.choices[0].message.content

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        messages = [{"role": "user", "content": prompt}]
        client = self.client(instructor.Mode.TOOLS, max_tokens)
        chunks = client.create(max_retries=0, messages=messages, response_model=None, stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in chunks]

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        client = self.client(instructor.Mode.TOOLS, max_tokens)
        return client.create(max_retries=0, messages=messages, response_model=Book).model_dump()

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        client = self.client(instructor.Mode.PARALLEL_TOOLS, max_tokens)
        completions: list[Any] = []
        client.on("completion:response", completions.append)
        asked = client.create(
            max_retries=0, messages=list(messages), response_model=Iterable[get_weather]
        )
        calls = [{"name": type(call).__name__, "arguments": call.model_dump()} for call in asked]
        message = completions[0].choices[0].message
        messages.append(message.model_dump())
        ids = [call.id for call in message.tool_calls]
        messages += [{"role": "tool", "tool_call_id": i, "content": weather} for i in ids]
        answer = client.create(max_retries=0, messages=messages, response_model=None)
        return calls, answer.choices[0].message.content


carry_out_tasks(Instructor(*sys.argv[1:]))
