"""From /tokenize and /detokenize requests to token ids and bytes."""

from __future__ import annotations

import asyncio

from engine.request import RequestError
from server.apis.shared.prompt.conversation import chat_options, template_messages
from server.apis.shared.prompt.function_messages import in_new_form
from server.apis.shared.prompt.turn import encode_turn
from server.apis.tokenize.schema import DetokenizeRequest, TokenizeRequest
from server.context import ServerContext


async def encode(body: TokenizeRequest, context: ServerContext) -> list[int]:
    """
    Raises:
        RequestError: there is not one thing to encode, or the model's template refuses it.
    """
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


async def decode(body: DetokenizeRequest, context: ServerContext) -> bytes:
    """
    Raises:
        RequestError: a token id is none.
    """
    tokenizer = context.engine.tokenizer
    num_known = len(tokenizer.token_bytes)
    if max(body.tokens, default=0) >= num_known:
        raise RequestError(f"Token ids must lie between 0 and {num_known - 1}.", param="tokens")
    return await asyncio.to_thread(tokenizer.bytes_of, body.tokens)
