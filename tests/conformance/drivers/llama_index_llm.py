"""llama-index's OpenAILike, its structured LLM and its FunctionAgent."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from driver import Book, Calls, carry_out_tasks, weather_tool
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


class LlamaIndex:
    def __init__(self, url: str, model: str) -> None:
        self.server = {"api_base": f"{url}/v1", "model": model, "api_key": "none"}

    def llm(self, max_tokens: int) -> OpenAILike:
        kind = {"is_chat_model": True, "is_function_calling_model": True}
        settings = {"temperature": 0, "max_tokens": max_tokens, "max_retries": 0}
        return OpenAILike(**self.server, **kind, **settings)

    def text(self, prompt: str, max_tokens: int) -> str:
        return self.llm(max_tokens).chat([ChatMessage(prompt)]).message.content

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        return [part.delta for part in self.llm(max_tokens).stream_chat([ChatMessage(prompt)])]

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        llm = self.llm(max_tokens).as_structured_llm(Book)
        return llm.chat([ChatMessage(prompt)]).raw.model_dump()

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        get_weather, calls = weather_tool(weather)

        async def run() -> str:
            agent = FunctionAgent(tools=[get_weather], llm=self.llm(max_tokens))
            return str(await agent.run(prompt))

        return calls, asyncio.run(run())


carry_out_tasks(LlamaIndex(*sys.argv[1:]))
