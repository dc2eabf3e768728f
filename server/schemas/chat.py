"""Requests and responses of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import FailFast, Field

from server.schemas.common import CompletionUsage, RequestModel, ResponseModel
from server.schemas.content import TextContent
from server.schemas.sampling import SamplingFields


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: TextContent

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


ChatMessages = Annotated[list[ChatMessage], FailFast(), Field(min_length=1)]


class ChatRequest(SamplingFields):
    messages: ChatMessages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)


class TopLogprob(ResponseModel):
    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprob(ResponseModel):
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ChatTokenLogprob]
    refusal: None


class AssistantMessage(ResponseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class ChatDelta(ResponseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChatChunkChoice(ResponseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None


class ChatChunk(ResponseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | None = None
