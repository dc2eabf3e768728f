"""From the items and tools of /v1/responses to what a chat template is given, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.apis.responses.items import (
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputMessage,
    InputReasoning,
    InputShellCall,
    InputText,
)
from server.apis.responses.render import call_id
from server.apis.responses.schema import (
    AllowedResponseTools,
    FunctionTool,
    NamedTool,
    ResponsesRequest,
)
from server.apis.shared.prompt.conversation import (
    TEMPLATE_ROLES,
    Message,
    add_call,
    add_written_call,
)
from server.apis.shared.render.blocks import Block, BlockKind
from server.apis.shared.schema.tools import (
    AllowedTools,
    AllowedToolsChoice,
    FunctionSpec,
    NamedFunction,
    NamedToolChoice,
    Tool,
)


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

    def add_call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        add_call(self._answer(), call_id, name, arguments)

    def add_written_call(self, call_id: str, name: str, arguments: str) -> None:
        add_written_call(self._answer(), call_id, name, arguments)

    def _answer(self) -> Message:
        if not self._in_answer:
            self.messages.append({"role": "assistant", "content": ""})
            self._in_answer = True
        return self.messages[-1]


def add_input(builder: MessageBuilder, body: ResponsesRequest) -> None:
    if isinstance(body.input, str):
        builder.add({"role": "user", "content": body.input})
        return
    for item in body.input:
        match item:
            case InputMessage(role="assistant"):
                builder.add_text(_text(item.content))
            case InputMessage():
                role = TEMPLATE_ROLES.get(item.role, item.role)
                builder.add({"role": role, "content": _text(item.content)})
            case InputCall():
                builder.add_written_call(item.call_id, item.name, item.arguments)
            case InputCustomCall():
                builder.add_call(item.call_id, item.name, {"input": item.input})
            case InputShellCall():
                builder.add_call(item.call_id, "local_shell", item.action)
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
    """An answer of this server."""
    for block in blocks:
        if block.kind is BlockKind.TEXT:
            builder.add_text(block.text)
        elif block.kind is BlockKind.REASONING:
            builder.add_reasoning(block.text)
        else:
            builder.add_written_call(call_id(block), block.name, block.text)


def with_instructions(instructions: str | None, messages: Sequence[Message]) -> tuple[Message, ...]:
    """One system message in front, whatever of that rank begins the conversation.

    Many templates have a place for only one.
    """
    num_first = next(
        (n for n, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    texts = [message["content"] for message in messages[:num_first]]
    if instructions:
        texts.insert(0, instructions)
    if not texts:
        return tuple(messages)
    return ({"role": "system", "content": "\n\n".join(texts)}, *messages[num_first:])


def chat_tools(tools: Sequence[FunctionTool]) -> list[Tool]:
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
        for tool in tools
    ]


def chat_tool_choice(
    choice: str | NamedTool | AllowedResponseTools | None,
) -> str | NamedToolChoice | AllowedToolsChoice | None:
    match choice:
        case NamedTool():
            return _named(choice)
        case AllowedResponseTools():
            allowed = AllowedTools(mode=choice.mode, tools=[_named(tool) for tool in choice.tools])
            return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
    return choice


def _named(tool: NamedTool) -> NamedToolChoice:
    return NamedToolChoice(type="function", function=NamedFunction(name=tool.name))


def _text(content: str | Sequence[InputText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)
