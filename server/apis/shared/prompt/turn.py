"""One turn of a conversation, made ready for the engine; every chat-like API goes through it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.request import ChatOptions, ChatPrompt, RequestError
from server.apis.shared.grammar.tool_calls import ForcedCall, TagTokens, ToolCalls
from server.apis.shared.prompt.prepared_prompt import PreparedPrompt, prepare_prompt
from server.apis.shared.schema.sampling import SamplingFields
from server.context import ServerContext
from server.limits import check_tools
from server.parsing.answer import AnswerFormat

_PROMPT_END_TOKENS = 32
"""Enough to hold an opening tag and white space."""


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: PreparedPrompt
    answer_format: AnswerFormat


async def encode_turn(
    context: ServerContext, messages: tuple[Mapping[str, Any], ...], options: ChatOptions
) -> tuple[int, ...]:
    """Token ids of a conversation.

    Raises:
        RequestError: it has too many tools, or the model's template refuses it or has no place
            for tools.
    """
    if options.tools:
        await asyncio.to_thread(check_tools, options.tools, context.config.limits)
    template = context.engine.tokenizer.chat_template
    if options.tools and template.source and not template.mentions("tools"):
        raise RequestError(
            "The model's chat template has no place for tools.",
            param="tools",
            code="unsupported_parameter",
        )
    return tuple(await context.engine.encode_chat(messages, options))


async def prepare_turn(
    context: ServerContext,
    messages: tuple[Mapping[str, Any], ...],
    options: ChatOptions,
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    max_calls: int | None,
    forced: ForcedCall | None,
) -> Turn:
    """
    Args:
        max_tokens: None: as many as fit the context.
        max_calls: tool calls the client wants at most; None: any number.
        forced: calls that the model must make; None: it decides.

    Raises:
        RequestError: the model can't serve it.
    """
    engine = context.engine
    token_ids = await encode_turn(context, messages, options)
    if max_tokens is None:
        max_tokens = max(1, engine.limits.max_context - len(token_ids))
    tokenizer = engine.tokenizer
    answer_format = AnswerFormat.of(
        tokenizer.chat_template.source,
        tokenizer.bytes_of(token_ids[-_PROMPT_END_TOKENS:]),
        tool_names=frozenset(tool["function"]["name"] for tool in options.tools),
        max_calls=max_calls,
        token_bytes=tokenizer.token_bytes,
    )
    form = answer_format.calls
    calls = None
    if form is not None:
        tags = TagTokens.find(tokenizer)
        calls = ToolCalls(options.tools, form, max_calls, forced, tags)
    prompt = await prepare_prompt(
        context,
        fields,
        token_ids,
        ChatPrompt(messages, options),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prelude=answer_format.prelude,
        calls=calls,
    )
    return Turn(prompt, answer_format)
