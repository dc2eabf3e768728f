"""From the items and tools of /v1/responses to what a chat template is given, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.request import RequestError
from server.conversation import TEMPLATE_ROLES, Message, parsed_arguments
from server.render.blocks import Block, BlockKind
from server.render.responses import call_id
from server.schemas.responses import (
    FunctionTool,
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    InputText,
    NamedTool,
    ResponsesRequest,
)
from server.schemas.tools import FunctionSpec, NamedFunction, NamedToolChoice, Tool


class MessageBuilder:
    """Gathers messages; reasoning, text and calls of one answer become one assistant message."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self.messages = list(messages)
        self._in_answer = False

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self._in_answer = False

    def add_text(self, text: str) -> None:
        answer = self._answer()
        answer["content"] += text

    def add_reasoning(self, text: str) -> None:
        answer = self._answer()
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def add_call(self, call_id: str, name: str, arguments: dict[str, object]) -> None:
        call = {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._answer().setdefault("tool_calls", []).append(call)

    def _answer(self) -> Message:
        if not self._in_answer:
            self.messages.append({"role": "assistant", "content": ""})
            self._in_answer = True
        return self.messages[-1]


def add_input(builder: MessageBuilder, body: ResponsesRequest) -> None:
    """
    Raises:
        RequestError: a call's arguments are no JSON object.
    """
    if isinstance(body.input, str):
        builder.add({"role": "user", "content": body.input})
        return
    for number, item in enumerate(body.input):
        match item:
            case InputMessage(role="assistant"):
                builder.add_text(_text(item.content))
            case InputMessage():
                role = TEMPLATE_ROLES.get(item.role, item.role)
                builder.add({"role": role, "content": _text(item.content)})
            case InputCall():
                arguments = parsed_arguments(item.arguments, f"input.{number}.arguments")
                builder.add_call(item.call_id, item.name, arguments)
            case InputCallOutput():
                builder.add(
                    {
                        "role": "tool",
                        "content": _text(item.output),
                        "tool_call_id": item.call_id,
                    }
                )
            case InputReasoning():
                builder.add_reasoning("".join(part.text for part in item.content or ()))


def add_answer(builder: MessageBuilder, blocks: Sequence[Block]) -> None:
    """An answer of this server; a call whose arguments are no JSON object is left out."""
    for block in blocks:
        if block.kind is BlockKind.TEXT:
            builder.add_text(block.text)
        elif block.kind is BlockKind.REASONING:
            builder.add_reasoning(block.text)
        else:
            try:
                arguments = parsed_arguments(block.text, "arguments")
            except RequestError:
                continue
            builder.add_call(call_id(block), block.name, arguments)


def chat_tools(tools: Sequence[FunctionTool] | None) -> list[Tool]:
    """Tools in the form of the chat API."""
    return [
        Tool(
            type="function",
            function=FunctionSpec(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            ),
        )
        for tool in tools or ()
    ]


def chat_tool_choice(choice: str | NamedTool | None) -> str | NamedToolChoice | None:
    if isinstance(choice, NamedTool):
        return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    return choice


def _text(content: str | Sequence[InputText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)
