"""Messages as chat templates are given them, built one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from server.parsing.call_arguments import call_arguments

Message = dict[str, Any]

TEMPLATE_ROLES = {"developer": "system"}
"""Chat templates know no developer; OpenAI gives its words the system's rank."""


def add_call(answer: Message, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
    """Put a call into an assistant's message."""
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    answer.setdefault("tool_calls", []).append(call)


def add_written_call(answer: Message, call_id: str, name: str, arguments: str) -> None:
    """The same for a call as the model wrote it.

    Arguments that are no JSON object can be given to no template that looks into them: with them
    the call stands as text, which is how the model would have gone on.
    """
    value = call_arguments(arguments)
    if value is not None:
        add_call(answer, call_id, name, value)
        return
    call = f'{{"name": {json.dumps(name)}, "arguments": {arguments}'
    answer["content"] = "\n".join(text for text in (answer["content"], call) if text)


class TextPart(Protocol):
    """A part of a content that is a list, whichever API's."""

    @property
    def text(self) -> str: ...


def joined_text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class MessageBuilder:
    """Gathers messages; reasoning, text and calls of one answer become one assistant message."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self.messages = list(messages)
        self._in_answer = False

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self._in_answer = False

    def add_text(self, text: str) -> None:
        answer = self._answer()
        answer["content"] += text

    def add_reasoning(self, text: str) -> None:
        answer = self._answer()
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def add_call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        add_call(self._answer(), call_id, name, arguments)

    def add_written_call(self, call_id: str, name: str, arguments: str) -> None:
        add_written_call(self._answer(), call_id, name, arguments)

    def _answer(self) -> Message:
        if not self._in_answer:
            self.messages.append({"role": "assistant", "content": ""})
            self._in_answer = True
        return self.messages[-1]
