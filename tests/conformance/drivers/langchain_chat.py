"""langchain-openai's ChatOpenAI."""

from __future__ import annotations

import sys
from typing import Any

from driver import Book, Calls, carry_out_tasks, weather_tool
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


class LangChain:
    def __init__(self, url: str, model: str) -> None:
        self.settings = {"base_url": f"{url}/v1", "model": model, "api_key": "none"}

    def chat(self, max_tokens: int) -> ChatOpenAI:
        return ChatOpenAI(**self.settings, temperature=0, max_tokens=max_tokens, max_retries=0)

    def text(self, prompt: str, max_tokens: int) -> str:
        return self.chat(max_tokens).invoke(prompt).content

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        return [chunk.content for chunk in self.chat(max_tokens).stream(prompt)]

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return self.chat(max_tokens).with_structured_output(Book).invoke(prompt).model_dump()

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        function, calls = weather_tool(weather)
        get_weather = tool(function)
        chat = self.chat(max_tokens).bind_tools([get_weather])
        messages: list[Any] = [HumanMessage(prompt)]
        messages.append(chat.invoke(messages))
        messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
        return calls, chat.invoke(messages).content


carry_out_tasks(LangChain(*sys.argv[1:]))
