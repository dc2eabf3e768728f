"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Response

from engine.request import RequestError
from server.apis.chat.old_functions import in_new_form
from server.apis.shared.json_route import JsonRoute
from server.apis.shared.prompt.conversation import chat_options, template_messages
from server.apis.shared.prompt.turn import encode_turn
from server.apis.shared.render.tokens import token_text
from server.apis.shared.respond import json_response
from server.apis.shared.schema.common import ErrorBody
from server.apis.tokenize.schema import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from server.context import Context, ServerContext

router = APIRouter(route_class=JsonRoute, tags=["Tokens"])
errors: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}}


@router.post(
    "/tokenize",
    summary="Turn a text or a chat into token ids",
    response_model=None,
    responses={200: {"model": Tokenized}, **errors},
)
async def tokenize(body: TokenizeRequest, context: Context) -> Response:
    _require_model(body.model, context)
    tokens = await _token_ids(body, context)
    strings = None
    if body.return_token_strs:
        strings = [token_text(context.engine.tokenizer.token_bytes[i]) for i in tokens]
    return json_response(
        Tokenized(
            count=len(tokens),
            max_model_len=context.engine.limits.max_context,
            tokens=tokens,
            token_strs=strings,
        )
    )


@router.post(
    "/detokenize",
    summary="Turn token ids into a text",
    response_model=None,
    responses={200: {"model": Detokenized}, **errors},
)
async def detokenize(body: DetokenizeRequest, context: Context) -> Response:
    _require_model(body.model, context)
    tokenizer = context.engine.tokenizer
    num_known = len(tokenizer.token_bytes)
    if max(body.tokens, default=0) >= num_known:
        raise RequestError(f"Token ids must lie between 0 and {num_known - 1}.", param="tokens")
    whole = await asyncio.to_thread(tokenizer.bytes_of, body.tokens)
    return json_response(Detokenized(prompt=whole.decode(errors="replace")))


async def _token_ids(body: TokenizeRequest, context: ServerContext) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Exactly one of 'prompt' and 'messages' must be given.", param="prompt")
    if body.prompt is not None:
        with_special = body.add_special_tokens is not False
        return await context.engine.encode(body.prompt, add_special_tokens=with_special)
    messages = body.messages or []
    options = chat_options(
        messages,
        body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        args=body.chat_template_kwargs,
    )
    return list(await encode_turn(context, template_messages(in_new_form(messages)), options))


def _require_model(name: str | None, context: ServerContext) -> None:
    if name is not None:
        context.require_model(name)
