"""From /v1/chat/completions requests to what the engine is given."""

from __future__ import annotations

from collections.abc import Mapping

from engine.config import LimitsConfig
from engine.request import RequestError
from server.apis.chat.old_functions import PARAMS, tools_and_choice, uses_old_form
from server.apis.chat.schema import ChatRequest
from server.apis.shared.grammar.tool_calls import forced_call
from server.apis.shared.prompt.conversation import chat_options, template_messages
from server.apis.shared.prompt.function_messages import in_new_form
from server.apis.shared.prompt.sampling import check_logprobs
from server.apis.shared.prompt.tools import select_tools
from server.apis.shared.prompt.turn import Turn, prepare_turn
from server.apis.shared.prompt.unsupported_fields import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_MESSAGE,
    refuse_unsupported,
)
from server.context import ServerContext


def check(body: ChatRequest, limits: LimitsConfig) -> None:
    """
    Raises:
        RequestError: fields that are not served, over a limit or contradict each other.
    """
    refuse_unsupported(body.model_extra, UNSUPPORTED_CHAT)
    for number, message in enumerate(body.messages):
        refuse_unsupported(message.model_extra, UNSUPPORTED_MESSAGE, prefix=f"messages.{number}.")
    if body.top_logprobs is not None:
        if body.top_logprobs and not body.logprobs:
            raise RequestError(
                "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
            )
        check_logprobs(body.top_logprobs, limits, "top_logprobs")
    both_limits = body.max_tokens is not None and body.max_completion_tokens is not None
    if both_limits and body.max_tokens != body.max_completion_tokens:
        raise RequestError(
            "'max_tokens' and 'max_completion_tokens' differ; set only one of them.",
            param="max_tokens",
        )


async def prepare_chat(body: ChatRequest, context: ServerContext) -> Turn:
    """
    Raises:
        RequestError: the model can't serve it.
    """
    selection = select_tools(*tools_and_choice(body))
    one_call = uses_old_form(body) or body.parallel_tool_calls is False
    return await prepare_turn(
        context,
        template_messages(in_new_form(body.messages)),
        chat_options(
            body.messages,
            selection.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            args=body.chat_template_kwargs,
            reasoning_effort=body.reasoning_effort,
        ),
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_calls=1 if one_call else None,
        forced=forced_call(selection.choice),
    )


def api_names(body: ChatRequest) -> Mapping[str, str]:
    """The names that the request has for the engine's fields."""
    names = {"prompt": "messages"}
    if uses_old_form(body):
        names |= PARAMS
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names
