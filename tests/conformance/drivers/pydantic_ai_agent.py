"""pydantic-ai's Agent on its chat or its responses model."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from driver import Book, Calls, carry_out_tasks, weather_tool
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


class PydanticAI:
    def __init__(self, url: str, model: str, variant: str) -> None:
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
        self.model = MODELS[variant](model, provider=provider)

    def agent(self, max_tokens: int, **options: Any) -> Agent[None, Any]:
        settings = {"temperature": 0, "max_tokens": max_tokens}
        return Agent(self.model, model_settings=settings, retries=0, **options)

    def text(self, prompt: str, max_tokens: int) -> str:
        return self.agent(max_tokens).run_sync(prompt).output

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        async def pieces() -> list[str]:
            async with self.agent(max_tokens).run_stream(prompt) as answer:
                return [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]

        return asyncio.run(pieces())

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return self.agent(max_tokens, output_type=Book).run_sync(prompt).output.model_dump()

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        get_weather, calls = weather_tool(weather)
        answer = self.agent(max_tokens, tools=[get_weather]).run_sync(prompt)
        return calls, answer.output


carry_out_tasks(PydanticAI(*sys.argv[1:]))
