"""Messages of a chat, as OpenAI's chat API writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from server.apis.shared.schema.base import RequestModel
from server.apis.shared.schema.content import TextContent
from server.apis.shared.schema.tools import (
    CalledFunction,
    ToolCalls,
)


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: TextContent | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_parts_beside_calls_are_no_content(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("content") == [] and data.get("tool_calls"):
            return {**data, "content": None}
        return data


ChatMessages = TypeAliasType(
    "ChatMessages", Annotated[list[ChatMessage], FailFast(), Field(min_length=1)]
)
