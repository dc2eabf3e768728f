"""openai-agents' Runner on its chat or its responses model."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from driver import Book, Calls, carry_out_tasks, weather_tool
from openai import AsyncOpenAI

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class Agents:
    def __init__(self, url: str, model: str, variant: str) -> None:
        self.url, self.name, self.variant = url, model, variant

    def agent(self, max_tokens: int, **options: Any) -> Agent:
        client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        model = MODELS[self.variant](self.name, openai_client=client)
        settings = ModelSettings(temperature=0, max_tokens=max_tokens)
        return Agent(name="assistant", model=model, model_settings=settings, **options)

    def text(self, prompt: str, max_tokens: int) -> str:
        return Runner.run_sync(self.agent(max_tokens), prompt).final_output

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        async def pieces() -> list[str]:
            events = Runner.run_streamed(self.agent(max_tokens), prompt).stream_events()
            raw = [event.data async for event in events if event.type == "raw_response_event"]
            return [event.delta for event in raw if event.type == "response.output_text.delta"]

        return asyncio.run(pieces())

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        agent = self.agent(max_tokens, output_type=Book)
        return Runner.run_sync(agent, prompt).final_output.model_dump()

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        get_weather, calls = weather_tool(weather)
        agent = self.agent(max_tokens, tools=[function_tool(get_weather)])
        return calls, Runner.run_sync(agent, prompt, max_turns=3).final_output


carry_out_tasks(Agents(*sys.argv[1:]))
