"""What every Python driver shares: what is asked for, and the loop that carries out the tasks.

A driver is run as `python DRIVER URL MODEL [VARIANT]` by the interpreter that has its client. Each
line of its stdin is a task with its arguments, each line of its stdout what came of it.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from pydantic import BaseModel, Field


class Book(BaseModel):
    title: str
    author: str
    year: int


class GetWeather(BaseModel):
    """Get the current weather of a city."""

    city: str = Field(description="name of the city")


Calls = list[dict[str, Any]]
"""Name and arguments of each call of a tool."""


class Driver(Protocol):
    def text(self, prompt: str, max_tokens: int) -> str: ...

    def stream(self, prompt: str, max_tokens: int) -> list[str]: ...

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]: ...

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        """The calls made, and the answer after the tool said `weather`."""
        ...


def weather_tool(weather: str) -> tuple[Callable[[str], str], Calls]:
    """A tool that notes its calls, for clients that run tools themselves."""
    calls: Calls = []

    def get_weather(city: str) -> str:
        """Get the current weather of a city."""
        calls.append({"name": "get_weather", "arguments": {"city": city}})
        return weather

    return get_weather, calls


def carry_out_tasks(driver: Driver) -> None:
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            reply = {"result": getattr(driver, arguments.pop("task"))(**arguments)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)
