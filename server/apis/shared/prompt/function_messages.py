"""Messages of the chat API's old form of tools: `function_call` and the role function."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import RequestError
from server.apis.shared.schema.messages import ChatMessage
from server.apis.shared.schema.tools import (
    ToolCall,
)


def in_new_form(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Messages with calls and results as tools have them; a result belongs to the latest call.

    Raises:
        RequestError: a message has what its role can't have, or a result lacks its function's name.
    """
    converted = []
    call_id = ""
    for number, message in enumerate(messages):
        param = f"messages.{number}"
        if message.function_call is not None:
            if message.role != "assistant" or message.tool_calls:
                raise RequestError(
                    f"'{param}.function_call' is only allowed in an assistant message without "
                    "'tool_calls'.",
                    param=f"{param}.function_call",
                )
            call_id = _call_id(number)
            call = ToolCall(id=call_id, type="function", function=message.function_call)
            message = message.model_copy(update={"tool_calls": [call], "function_call": None})
        elif message.role == "function":
            if message.name is None:
                raise RequestError(
                    f"Missing required parameter: '{param}.name'.", param=f"{param}.name"
                )
            update = {"role": "tool", "tool_call_id": call_id or _call_id(number)}
            message = message.model_copy(update=update)
        converted.append(message)
    return converted


def _call_id(number: int) -> str:
    """Nine letters and digits: some templates refuse all others."""
    return f"call{number:05}"
