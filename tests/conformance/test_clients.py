"""Clients people use, each on four tasks: text, a stream, structured output, a tool call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import jsonschema
import pytest

from tests.conformance.driven import Driven, driven
from tests.conformance.environments import ENVIRONMENTS
from tests.e2e.served import Served

pytestmark = [pytest.mark.slow, pytest.mark.conformance, pytest.mark.real]


@dataclass(frozen=True)
class Client:
    environment: str
    driver: str
    variant: tuple[str, ...] = ()
    calls_tools: bool = True


CLIENTS = {
    "openai chat": Client("openai", "openai_chat.py"),
    "openai responses": Client("openai", "openai_responses.py"),
    "anthropic": Client("anthropic", "anthropic_messages.py"),
    "langchain": Client("langchain", "langchain_chat.py"),
    "pydantic-ai chat": Client("pydantic-ai", "pydantic_ai_agent.py", ("chat",)),
    "pydantic-ai responses": Client("pydantic-ai", "pydantic_ai_agent.py", ("responses",)),
    "instructor": Client("instructor", "instructor_chat.py"),
    "litellm": Client("litellm", "litellm_completion.py"),
    "llama-index": Client("llama-index", "llama_index_llm.py"),
    "openai-agents chat": Client("openai-agents", "openai_agents.py", ("chat",)),
    "openai-agents responses": Client("openai-agents", "openai_agents.py", ("responses",)),
    "llm chat": Client("llm", "llm_command.py", ("chat",)),
    "llm responses": Client("llm", "llm_command.py", ("responses",)),
    "guidance": Client("guidance", "guidance_model.py"),
    "outlines": Client("outlines", "outlines_vllm.py", calls_tools=False),
    "ai-sdk chat": Client("ai-sdk", "ai_sdk.mjs", ("chat",)),
    "ai-sdk responses": Client("ai-sdk", "ai_sdk.mjs", ("responses",)),
}

QUESTION = "Write one sentence about the sea."
BLURB = "Dune was written by Frank Herbert and came out in 1965. Give its title, author and year."
ERRAND = (
    "Get the weather in Oslo with the tool. When the tool has answered, "
    "tell me the temperature in one sentence."
)
"""Asked less plainly, this model calls the tool again and again."""
BOOK = {
    "type": "object",
    "properties": {
        "title": {"const": "Dune"},
        "author": {"const": "Frank Herbert"},
        "year": {"const": 1965},
    },
    "required": ["title", "author", "year"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def expected(coder: Served) -> str:
    """The answer to QUESTION as HTTP alone gives it."""
    body = {
        "model": "coder",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 32,
    }
    answer = httpx.post(f"{coder.url}/v1/chat/completions", json=body, timeout=120).json()
    text: str = answer["choices"][0]["message"]["content"]
    assert text.strip()
    return text


@pytest.fixture(scope="module", params=CLIENTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(name: str, coder: Served) -> Iterator[Driven]:
    environment = ENVIRONMENTS[CLIENTS[name].environment]
    if reason := environment.why_missing():
        pytest.skip(reason)
    command = environment.command(CLIENTS[name].driver)
    with driven([*command, coder.url, "coder", *CLIENTS[name].variant]) as client:
        yield client


def test_text(client: Driven, expected: str) -> None:
    assert client.do("text", prompt=QUESTION, max_tokens=32) == expected


def test_stream(client: Driven, expected: str) -> None:
    pieces = client.do("stream", prompt=QUESTION, max_tokens=32)
    assert "".join(pieces) == expected
    assert sum(map(bool, pieces)) > 3


def test_structured_output(client: Driven) -> None:
    book = client.do("structured", prompt=BLURB, max_tokens=80)
    jsonschema.validate(book, BOOK)


def test_tool_call(client: Driven, name: str) -> None:
    if not CLIENTS[name].calls_tools:
        pytest.skip("it knows no tools")
    calls, answer = client.do(
        "tool_call",
        prompt=ERRAND,
        max_tokens=64,
        weather='{"city": "Oslo", "weather": "snow", "temperature": -41}',
    )
    assert calls == [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
    assert "-41" in answer
