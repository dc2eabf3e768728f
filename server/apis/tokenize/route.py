"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Response

from server.apis.shared.http.json_response import json_response
from server.apis.shared.http.json_route import JsonRoute
from server.apis.shared.http.openapi import whole
from server.apis.tokenize.prompt import decode, encode
from server.apis.tokenize.render import detokenized, tokenized
from server.apis.tokenize.schema import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from server.context import Context, ServerContext

router = APIRouter(route_class=JsonRoute, tags=["Tokens"])


@router.post(
    "/tokenize",
    summary="Turn a text or a chat into token ids",
    response_model=None,
    responses=whole(Tokenized),
)
async def tokenize(body: TokenizeRequest, context: Context) -> Response:
    _require_model(body.model, context)
    engine = context.engine
    return json_response(
        tokenized(
            await encode(body, context),
            max_context=engine.limits.max_context,
            token_bytes=engine.tokenizer.token_bytes if body.return_token_strs else None,
        )
    )


@router.post(
    "/detokenize",
    summary="Turn token ids into a text",
    response_model=None,
    responses=whole(Detokenized),
)
async def detokenize(body: DetokenizeRequest, context: Context) -> Response:
    _require_model(body.model, context)
    return json_response(detokenized(await decode(body, context)))


def _require_model(name: str | None, context: ServerContext) -> None:
    if name is not None:
        context.require_model(name)
