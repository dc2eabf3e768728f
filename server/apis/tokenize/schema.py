"""Requests and responses of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from server.apis.shared.schema.base import RequestModel, ResponseModel
from server.apis.shared.schema.messages import ChatMessages
from server.apis.shared.schema.sampling import TokenIds
from server.apis.shared.schema.tools import Tools


class TokenizeRequest(RequestModel):
    """Either a prompt, or messages with the fields that shape them."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: ChatMessages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class Tokenized(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: TokenIds


class Detokenized(ResponseModel):
    prompt: str
