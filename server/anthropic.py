"""From the messages and tools of /v1/messages to what a chat template is given."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import ChatOptions, RequestError
from server.conversation import Message, active_tools, template_tools
from server.items import MessageBuilder
from server.schemas.messages import (
    AnthropicToolChoice,
    CountTokensRequest,
    InputMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from server.schemas.tools import FunctionSpec, NamedFunction, NamedToolChoice, Tool


def conversation(body: CountTokensRequest) -> tuple[Message, ...]:
    builder = MessageBuilder()
    if body.system:
        builder.add({"role": "system", "content": _text(body.system)})
    for message in body.messages:
        if message.role == "assistant":
            _add_answer(builder, message)
        else:
            _add_user(builder, message)
    return tuple(builder.messages)


def chat_options(body: CountTokensRequest) -> ChatOptions:
    """
    Raises:
        RequestError: tools that share a name, or a choice that names none of them.
    """
    tools = [
        Tool(
            type="function",
            function=FunctionSpec(
                name=tool.name, description=tool.description, parameters=tool.input_schema
            ),
        )
        for tool in body.tools or ()
    ]
    continues = body.messages[-1].role == "assistant"
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    return ChatOptions(
        tools=template_tools(active_tools(tools, chat_tool_choice(body.tool_choice))),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_args={"enable_thinking": thinks},
    )


def chat_tool_choice(choice: AnthropicToolChoice | None) -> str | NamedToolChoice | None:
    """
    Raises:
        RequestError: it is to name a tool and doesn't.
    """
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError(
                "Missing required parameter: 'tool_choice.name'.", param="tool_choice.name"
            )
        return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _add_answer(builder: MessageBuilder, message: InputMessage) -> None:
    if isinstance(message.content, str):
        builder.add_text(message.content)
        return
    for block in message.content:
        match block:
            case TextBlock():
                builder.add_text(block.text)
            case ThinkingBlock():
                builder.add_reasoning(block.thinking)
            case ToolUseBlock():
                builder.add_call(block.id, block.name, block.input)


def _add_user(builder: MessageBuilder, message: InputMessage) -> None:
    """Results of tools become messages of their own, in front of the user's text."""
    if isinstance(message.content, str):
        builder.add({"role": "user", "content": message.content})
        return
    texts = []
    for block in message.content:
        match block:
            case ToolResultBlock():
                result = _text(block.content or "")
                builder.add({"role": "tool", "content": result, "tool_call_id": block.tool_use_id})
            case TextBlock():
                texts.append(block.text)
    if texts:
        builder.add({"role": "user", "content": "\n".join(texts)})


def _text(content: str | Sequence[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)
