"""From the messages and tools of /v1/messages to what a chat template is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.request import ChatOptions, RequestError
from server.apis.messages.schema import (
    AnthropicToolChoice,
    CountTokensRequest,
    InputMessage,
    SchemaOutput,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from server.apis.responses.prompt import MessageBuilder
from server.apis.responses.unserved_tools import served_tools
from server.apis.shared.prompt.conversation import (
    Message,
    ToolSelection,
    select_tools,
    template_tools,
)
from server.apis.shared.schema.structured import JsonSchemaFormat, NamedSchema
from server.apis.shared.schema.tools import FunctionSpec, NamedFunction, NamedToolChoice, Tool

_BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts in front of its system prompt, for Anthropic's accounts.

It differs from request to request, and would keep all that follows it out of the prefix cache.
"""


def conversation(body: CountTokensRequest) -> tuple[Message, ...]:
    builder = MessageBuilder()
    if system := _system_text(body.system or ""):
        builder.add({"role": "system", "content": system})
    for message in body.messages:
        if message.role == "system":
            builder.add({"role": "system", "content": _system_text(_texts(message))})
        elif message.role == "assistant":
            _add_answer(builder, message)
        else:
            _add_user(builder, message)
    return tuple(builder.messages)


def tool_selection(body: CountTokensRequest) -> ToolSelection:
    """
    Raises:
        RequestError: a choice that names none of the tools, or no tool that can be served.
    """
    tools = [
        Tool(
            type="function",
            function=FunctionSpec(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            ),
        )
        for tool in served_tools(body.tools)
    ]
    return select_tools(tools, chat_tool_choice(body.tool_choice))


def chat_options(body: CountTokensRequest, selection: ToolSelection) -> ChatOptions:
    """
    Raises:
        RequestError: tools that share a name.
    """
    continues = body.messages[-1].role == "assistant"
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    args: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
    if body.output_config is not None and body.output_config.effort is not None:
        args["reasoning_effort"] = body.output_config.effort
    return ChatOptions(
        tools=template_tools(selection.tools),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_args=args,
    )


def response_format(body: CountTokensRequest) -> JsonSchemaFormat | None:
    """The schema of the answer, as the chat API has it.

    Raises:
        RequestError: there are two.
    """
    of_config = None if body.output_config is None else body.output_config.format
    if of_config is not None and body.output_format is not None:
        raise RequestError(
            "'output_format' is the older name of 'output_config.format'; set only one of them.",
            param="output_format",
        )
    chosen: SchemaOutput | None = of_config or body.output_format
    if chosen is None:
        return None
    schema = NamedSchema(name="output", schema=chosen.json_schema)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


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


def _texts(message: InputMessage) -> str | list[TextBlock]:
    if isinstance(message.content, str):
        return message.content
    return [block for block in message.content if isinstance(block, TextBlock)]


def _system_text(content: str | Sequence[TextBlock]) -> str:
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    return "\n".join(text for text in map(_without_billing_header, texts) if text)


def _without_billing_header(text: str) -> str:
    if not text.startswith(_BILLING_HEADER):
        return text
    return text.partition("\n")[2].lstrip("\n")


def _text(content: str | Sequence[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)
