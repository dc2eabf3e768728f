"""The `llm` command line, told of this server by its `extra-openai-models.yaml`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.conformance.clients import needs_client, run_client
from tests.e2e.served import Served

pytestmark = [pytest.mark.slow, pytest.mark.conformance, needs_client("llm")]

PROMPT = "the cat eats"
OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens", "24")

Llm = Callable[..., str]


@pytest.fixture
def llm(tiny: Served, tmp_path: Path) -> Llm:
    """Runs `llm ARGUMENTS`; returns its stdout, and its stderr where asked to."""
    model = {"model_name": "tiny", "api_base": f"{tiny.url}/v1"}
    kinds: dict[str, dict[str, Any]] = {
        "chat": {"supports_schema": True},
        "text": {"completion": True},
        "responses": {"responses": True},
    }
    models = [{"model_id": name, **model, **kind} for name, kind in kinds.items()]
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))

    def run(*arguments: str, stdin: str = "", stderr: bool = False) -> str:
        env = {"LLM_USER_PATH": str(tmp_path)}
        done = run_client("llm", *arguments, cwd=tmp_path, env=env, stdin=stdin)
        return done.stderr if stderr else done.stdout

    return run


@pytest.fixture
def client(tiny: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, *contents: str) -> str:
    roles = ("user", "assistant")
    messages: Any = [
        {"role": roles[turn % 2], "content": content} for turn, content in enumerate(contents)
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=24
    )
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("flags", [(), ("--no-stream",), ("--async",)])
def test_chat(llm: Llm, client: openai.OpenAI, flags: tuple[str, ...]) -> None:
    answer = llm("prompt", "-m", "chat", *OPTIONS, *flags, PROMPT)
    assert answer.strip() == chat(client, PROMPT).strip() != ""


@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
def test_completion(llm: Llm, client: openai.OpenAI, flags: tuple[str, ...]) -> None:
    expected = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=24)
    answer = llm("prompt", "-m", "text", *OPTIONS, *flags, PROMPT)
    assert answer.strip() == expected.choices[0].text.strip() != ""


@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
def test_responses(llm: Llm, client: openai.OpenAI, flags: tuple[str, ...]) -> None:
    answer = llm("prompt", "-m", "responses", *OPTIONS, *flags, PROMPT)
    assert answer.strip() == chat(client, PROMPT).strip() != ""


@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
def test_usage(llm: Llm, flags: tuple[str, ...]) -> None:
    assert "24 output" in llm("prompt", "-m", "chat", *OPTIONS, *flags, "-u", PROMPT, stderr=True)


def test_conversation_goes_on(llm: Llm, client: openai.OpenAI) -> None:
    first = llm("prompt", "-m", "chat", *OPTIONS, PROMPT).rstrip("\n")
    second = llm("prompt", "-c", *OPTIONS, "Zoë counts")
    assert second.strip() == chat(client, PROMPT, first, "Zoë counts").strip()


@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
def test_schema(llm: Llm, flags: tuple[str, ...]) -> None:
    schema = {
        "type": "object",
        "properties": {"who": {"enum": ["cat", "robot"]}, "sells": {"type": "boolean"}},
        "required": ["who", "sells"],
        "additionalProperties": False,
    }
    answer = json.loads(llm("prompt", "-m", "chat", *flags, "--schema", json.dumps(schema), PROMPT))
    assert answer["who"] in {"cat", "robot"}
    assert isinstance(answer["sells"], bool)
