"""From /v1/responses requests to what the engine is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.request import CONTEXT_LENGTH_EXCEEDED, ChatOptions, RequestError
from server.apis.responses.items import (
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputMessage,
    InputReasoning,
    InputShellCall,
)
from server.apis.responses.schema import (
    AllowedResponseTools,
    FlatSchemaFormat,
    FunctionTool,
    NamedTool,
    ResponsesRequest,
)
from server.apis.responses.truncation import without_oldest_turns
from server.apis.shared.grammar.tool_calls import forced_call
from server.apis.shared.prompt.conversation import effort_args, template_args
from server.apis.shared.prompt.message_builder import (
    TEMPLATE_ROLES,
    Message,
    MessageBuilder,
    joined_text,
)
from server.apis.shared.prompt.tools import select_tools, template_tools
from server.apis.shared.prompt.turn import Turn, prepare_turn
from server.apis.shared.prompt.unsupported_fields import UNSUPPORTED_RESPONSES, refuse_unsupported
from server.apis.shared.schema.sampling import SamplingFields
from server.apis.shared.schema.structured import JsonSchemaFormat, ResponseFormat
from server.apis.shared.schema.tools import (
    AllowedTools,
    AllowedToolsChoice,
    FunctionSpec,
    NamedFunction,
    NamedToolChoice,
    Tool,
)
from server.context import ServerContext

_PARAMS = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
"""The engine's names of fields that are called otherwise here."""

_FORMAT_PARAMS = {
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}

_INCLUDABLE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Reasoning comes in clear in any case; the rest belongs to items that no answer has."""


def check(body: ResponsesRequest) -> None:
    """
    Raises:
        RequestError: fields that are not served or contradict each other.
    """
    refuse_unsupported(body.model_extra, UNSUPPORTED_RESPONSES)
    if body.n not in (None, 1):
        raise RequestError("A response has one answer: 'n' must be 1.", param="n")
    for wanted in body.include or ():
        if wanted not in _INCLUDABLE:
            raise RequestError(
                f"'include' asks for {wanted[:64]!r}, which this server does not tell.",
                param="include",
                code="unsupported_parameter",
            )
    if body.response_format is not None and body.text is not None and body.text.format is not None:
        raise RequestError(
            "'text.format' and 'response_format' both shape the output; set only one of them.",
            param="response_format",
        )


def add_input(builder: MessageBuilder, body: ResponsesRequest) -> None:
    if isinstance(body.input, str):
        builder.add({"role": "user", "content": body.input})
        return
    for item in body.input:
        match item:
            case InputMessage(role="assistant"):
                builder.add_text(joined_text(item.content))
            case InputMessage():
                role = TEMPLATE_ROLES.get(item.role, item.role)
                builder.add({"role": role, "content": joined_text(item.content)})
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
                        "content": joined_text(item.output),
                        "tool_call_id": item.call_id,
                    }
                )
            case InputReasoning():
                builder.add_reasoning("".join(part.text for part in item.content or ()))


async def prepare_response(
    body: ResponsesRequest,
    tools: Sequence[FunctionTool],
    conversation: Sequence[Message],
    context: ServerContext,
) -> Turn:
    """
    Args:
        conversation: of which the request's input is the end.

    Raises:
        RequestError: the model can't serve it.
    """
    messages = _with_instructions(body.instructions, conversation)
    selection = select_tools(_chat_tools(tools), _chat_tool_choice(body.tool_choice))
    effort = body.reasoning.effort if body.reasoning else None
    args = {**effort_args(effort), **template_args(body.chat_template_kwargs)}
    options = ChatOptions(tools=template_tools(selection.tools), template_args=args)
    fields = _sampling_fields(body)

    async def prepared(messages: tuple[Message, ...]) -> Turn:
        return await prepare_turn(
            context,
            messages,
            options,
            fields,
            max_tokens=body.max_output_tokens,
            logprobs=None,
            max_calls=1 if body.parallel_tool_calls is False else None,
            forced=forced_call(selection.choice),
        )

    try:
        return await prepared(messages)
    except RequestError as error:
        if body.truncation != "auto" or error.code != CONTEXT_LENGTH_EXCEEDED:
            raise
    kept = await without_oldest_turns(context, messages, options, body.max_output_tokens)
    return await prepared(kept)


def api_names(body: ResponsesRequest) -> Mapping[str, str]:
    """The names that the request has for the engine's fields."""
    has_format = body.text is not None and body.text.format is not None
    return {**_PARAMS, **(_FORMAT_PARAMS if has_format else {})}


def _with_instructions(
    instructions: str | None, messages: Sequence[Message]
) -> tuple[Message, ...]:
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


def _chat_tools(tools: Sequence[FunctionTool]) -> list[Tool]:
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


def _chat_tool_choice(
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


def _sampling_fields(body: ResponsesRequest) -> SamplingFields:
    """The request's, with its format where the chat API has it."""
    if body.text is None or body.text.format is None:
        return body
    chosen: ResponseFormat
    if isinstance(body.text.format, FlatSchemaFormat):
        chosen = JsonSchemaFormat(type="json_schema", json_schema=body.text.format)
    else:
        chosen = body.text.format
    return body.model_copy(update={"response_format": chosen})
