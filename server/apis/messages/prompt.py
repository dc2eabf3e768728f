"""From /v1/messages requests to what the engine is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.request import ChatOptions, RequestError
from server.apis.messages.schema import (
    AnthropicToolChoice,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    RedactedThinkingBlock,
    SchemaOutput,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from server.apis.shared.grammar.tool_calls import forced_call
from server.apis.shared.prompt.message_builder import Message, MessageBuilder, joined_text
from server.apis.shared.prompt.tools import (
    ToolSelection,
    select_tools,
    served_tools,
    template_tools,
)
from server.apis.shared.prompt.turn import Turn, encode_turn, prepare_turn
from server.apis.shared.prompt.unsupported_fields import UNSUPPORTED_MESSAGES, refuse_unsupported
from server.apis.shared.schema.sampling import SamplingFields
from server.apis.shared.schema.structured import JsonSchemaFormat, NamedSchema
from server.apis.shared.schema.tools import FunctionSpec, NamedFunction, NamedToolChoice, Tool
from server.context import ServerContext

_BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts in front of its system prompt, for Anthropic's accounts.

It differs from request to request, and would keep all that follows it out of the prefix cache.
"""


_PARAMS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""The engine's names of fields that are called otherwise here."""

_OLDER_PARAMS = {"response_format.json_schema.schema": "output_format.schema"}

_MISPLACED = {
    "assistant": (ToolResultBlock,),
    "user": (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
    "system": (ToolUseBlock, ToolResultBlock, ThinkingBlock, RedactedThinkingBlock),
}
"""Blocks by the roles in whose messages they can't stand."""


def check(body: CountTokensRequest) -> None:
    """
    Raises:
        RequestError: fields that are not served, or blocks where they can't stand.
    """
    refuse_unsupported(body.model_extra, UNSUPPORTED_MESSAGES)
    for number, message in enumerate(body.messages):
        if isinstance(message.content, str):
            continue
        for position, block in enumerate(message.content):
            if isinstance(block, _MISPLACED[message.role]):
                param = f"messages.{number}.content.{position}"
                raise RequestError(
                    f"'{param}': a {block.type} block can't stand in a message of the "
                    f"{message.role}.",
                    param=param,
                )


async def encode_message(body: CountTokensRequest, context: ServerContext) -> tuple[int, ...]:
    """The token ids of a conversation.

    Raises:
        RequestError: the model's template refuses it.
    """
    options = _chat_options(body, _tool_selection(body))
    return await encode_turn(context, _conversation(body), options)


async def prepare_message(body: MessagesRequest, context: ServerContext) -> Turn:
    """
    Raises:
        RequestError: the model can't serve it.
    """
    fields = SamplingFields(
        model=body.model,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop=body.stop_sequences,
        response_format=_response_format(body),
    )
    selection = _tool_selection(body)
    one_call = body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use)
    return await prepare_turn(
        context,
        _conversation(body),
        _chat_options(body, selection),
        fields,
        max_tokens=body.max_tokens,
        logprobs=None,
        max_calls=1 if one_call else None,
        forced=forced_call(selection.choice),
    )


def api_names(body: MessagesRequest) -> Mapping[str, str]:
    """The names that the request has for the engine's fields."""
    return _PARAMS if body.output_format is None else {**_PARAMS, **_OLDER_PARAMS}


def _conversation(body: CountTokensRequest) -> tuple[Message, ...]:
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


def _tool_selection(body: CountTokensRequest) -> ToolSelection:
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
    return select_tools(tools, _chat_tool_choice(body.tool_choice))


def _chat_options(body: CountTokensRequest, selection: ToolSelection) -> ChatOptions:
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


def _response_format(body: CountTokensRequest) -> JsonSchemaFormat | None:
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


def _chat_tool_choice(choice: AnthropicToolChoice | None) -> str | NamedToolChoice | None:
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
                result = joined_text(block.content or "")
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
