"""/v1/responses as the Codex command line uses it: its request, and the events it acts on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.request import FinishReason
from tests.server.scripted_engine import Step, words

SHELL = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "timeout_ms": {"type": "number"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
OTHER_TOOLS: list[dict[str, Any]] = [
    {"type": "custom", "name": "apply_patch", "description": "", "format": {"type": "grammar"}},
    {"type": "web_search", "external_web_access": False},
    {"type": "tool_search", "execution": "client", "description": "", "parameters": {}},
    {"type": "image_generation", "output_format": "png"},
    {"type": "namespace", "name": "mcp__docs", "description": "", "tools": []},
    {"type": "local_shell"},
]


def message(role, text):
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


FIRST = [
    message("developer", "Permissions."),
    message("user", "Context."),
    message("user", "List."),
]
REQUEST = {
    "model": "tiny/model",
    "instructions": "You are a coding agent.",
    "input": FIRST,
    "tools": [SHELL, *OTHER_TOOLS],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto", "context": "all"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "0199-4",
    "client_metadata": {"x-codex-installation-id": "1"},
    "text": {
        "verbosity": "low",
        "format": {
            "type": "json_schema",
            "strict": True,
            "schema": {"type": "object"},
            "name": "codex_output_schema",
        },
    },
}
THINK = ["<think>", "Hm", ".</think>"]
CALL = ["<tool_call>", '{"name": "exec_command", "arguments": {"cmd": "ls"}}', "</tool_call>"]


@pytest.fixture
def turn(client, engine):
    engine.max_context = 4000
    engine.tokenizer.chat_template.source = "{{ tools }} <tool_call> </think>"

    async def turn(**fields):
        response = await client.http.post("/v1/responses", json={**REQUEST, **fields})
        assert response.status_code == 200, response.text
        return Turn(response.text)

    return turn


class Turn:
    """What the client makes of a stream: it acts on these events and passes over all others."""

    def __init__(self, stream):
        self.items, self.texts, self.thoughts = [], [], []
        self.created = False
        self.usage: Any = None
        self.failure: Any = None
        for line in stream.splitlines():
            if line.startswith("data: "):
                self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event):
        match event["type"]:
            case "response.created":
                self.created = bool(event["response"])
            case "response.output_text.delta":
                self.texts.append(event["delta"])
            case "response.reasoning_text.delta":
                assert event["content_index"] == 0
                self.thoughts.append(event["delta"])
            case "response.output_item.done":
                self.items.append(event["item"])
            case "response.completed":
                assert event["response"]["id"]
                self.usage = event["response"]["usage"]
            case "response.failed":
                self.failure = event["response"]["error"]


async def test_turn_with_a_call_and_the_next(turn, engine, caplog):
    engine.script = lambda request: words(*THINK, *CALL)
    first = await turn()
    assert first.created
    assert "".join(first.thoughts) == "Hm."
    reasoning, call = first.items
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert (call["name"], json.loads(call["arguments"])) == ("exec_command", {"cmd": "ls"})
    assert first.usage["total_tokens"] == (
        first.usage["input_tokens"] + first.usage["output_tokens"]
    )
    assert first.usage["output_tokens_details"]["reasoning_tokens"] > 0
    (request,) = engine.submitted
    assert [tool["function"]["name"] for tool in request.source.options.tools] == ["exec_command"]
    assert request.source.messages[:2] == (
        {"role": "system", "content": "You are a coding agent.\n\nPermissions."},
        {"role": "user", "content": "Context."},
    )
    assert request.grammar is not None
    for tool in OTHER_TOOLS:
        assert f"a tool of type {tool['type']!r} is left out" in caplog.text

    engine.script = lambda request: words("Done.")
    sent = {key: value for key, value in call.items() if key not in ("id", "status")}
    thought: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": None}
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py"}
    history = [*FIRST, {**thought, "content": reasoning["content"]}, sent, output]
    second = await turn(input=history)
    assert "".join(second.texts) == second.items[0]["content"][0]["text"] == "Done."
    assert engine.submitted[1].source.messages[3:] == (
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": call["call_id"],
                    "type": "function",
                    "function": {"name": "exec_command", "arguments": {"cmd": "ls"}},
                }
            ],
        },
        {"role": "tool", "content": "a.py", "tool_call_id": call["call_id"]},
    )


async def test_items_of_other_servers_in_the_history(turn, engine):
    action = {"type": "exec", "command": ["ls"], "timeout_ms": 9}
    shell = {"type": "local_shell_call", "status": "completed", "call_id": "c1", "action": action}
    patch = {
        "type": "custom_tool_call",
        "call_id": "c2",
        "name": "apply_patch",
        "input": "*** Begin",
    }
    parts = [{"type": "input_text", "text": "ok"}]
    await turn(
        input=[
            *FIRST,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}],
             "content": None, "encrypted_content": "AA"},
            {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
            shell,
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
            patch,
            {"type": "custom_tool_call_output", "call_id": "c2", "output": parts},
        ]
    )  # fmt: skip
    messages = engine.submitted[0].source.messages[3:]
    assert [message["role"] for message in messages] == [
        "assistant", "tool", "assistant", "tool"
    ]  # fmt: skip
    calls = [m["tool_calls"][0]["function"] for m in messages if m["role"] == "assistant"]
    assert calls == [
        {"name": "local_shell", "arguments": action},
        {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
    ]
    assert messages[-1]["content"] == "ok"


async def test_failure_in_mid_stream(turn, engine):
    engine.script = lambda request: [
        *words("a", finish=None),
        Step("", (), FinishReason.ERROR, error="It broke."),
    ]
    failed = await turn()
    assert failed.usage is None
    assert failed.failure == {"code": "generation_failed", "message": "It broke."}
