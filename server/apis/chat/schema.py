"""Requests and responses of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, Tag
from typing_extensions import TypeAliasType

from server.apis.shared.schema.base import ReasoningEffort, ResponseModel, Verbosity
from server.apis.shared.schema.messages import ChatMessages
from server.apis.shared.schema.sampling import SamplingFields
from server.apis.shared.schema.tools import (
    FunctionCall,
    FunctionCallDelta,
    FunctionSpec,
    NamedFunction,
    ToolCallAnswer,
    ToolCallDelta,
    ToolChoice,
    Tools,
)
from server.apis.shared.schema.union import by_json_type
from server.apis.shared.schema.usage import CompletionUsage

ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


Functions = TypeAliasType("Functions", Annotated[list[FunctionSpec], FailFast()])


FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("<mode>")] | Annotated[NamedFunction, Tag("<named>")],
    by_json_type(
        {str: "<mode>", dict: "<named>"},
        error_type="function_choice_type",
        message="Input should be 'none', 'auto' or name a function",
    ),
]


class ChatRequest(SamplingFields):
    messages: ChatMessages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = Field(None, description="the old form of `tools`")
    function_call: FunctionChoice | None = Field(None, description="and of `tool_choice`")
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="switches the thinking of templates that can"
    )
    verbosity: Verbosity | None = Field(None, description="accepted; no template has a switch")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


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
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None
    function_call: FunctionCall | None = None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: list[int] | None = None


class ChatDelta(ResponseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionCallDelta | None = None


class ChatChunkChoice(ResponseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(ResponseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | None = None
    prompt_token_ids: list[int] | None = None
