"""The model's chat template: from a conversation to text, with the client's text kept apart."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import ChatOptions, RequestError

_PLACEHOLDER = "\ue000{}\ue001"
_PLACEHOLDERS = re.compile("\ue000(\\d+)\ue001")


@dataclass(frozen=True, slots=True)
class TemplatePart:
    """A stretch of a rendered conversation."""

    text: str
    is_literal: bool
    """Whether it is text of the client that must not be read as control tokens."""


class ChatTemplate:
    """Renders with transformers, which runs templates in a Jinja sandbox."""

    def __init__(self, tokenizer: Any, control_texts: Collection[str]) -> None:
        """
        Args:
            tokenizer: of transformers.
            control_texts: spellings of the control tokens.
        """
        self._tokenizer = tokenizer
        self.source = _source(tokenizer.chat_template)
        """The template's text; empty when the model has none."""
        longest_first = sorted(control_texts, key=len, reverse=True)
        self._kept_apart = re.compile(
            "|".join([*map(re.escape, longest_first), _PLACEHOLDERS.pattern])
        )

    def mentions(self, variable: str) -> bool:
        return re.search(rf"\b{re.escape(variable)}\b", self.source) is not None

    def parts(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> Iterator[TemplatePart]:
        """The rendered conversation; control text that stands in messages or tools is literal.

        Raises:
            RequestError: the template refuses the messages, or the model has none.
        """
        if not self.source:
            raise RequestError(
                "The model has no chat template; use /v1/completions.", param="messages"
            )
        literals: list[str] = []
        shielded = [self._shield(dict(message), literals) for message in messages]
        tools = [self._shield(dict(tool), literals) for tool in options.tools]
        rendered = self._render(shielded, tools, options)
        for index, text in enumerate(_PLACEHOLDERS.split(rendered)):
            if index % 2:
                yield TemplatePart(literals[int(text)], is_literal=True)
            elif text:
                yield TemplatePart(text, is_literal=False)

    def _render(self, messages: Sequence[Any], tools: Sequence[Any], options: ChatOptions) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    tokenize=False,
                    add_generation_prompt=options.add_generation_prompt,
                    continue_final_message=options.continue_final_message,
                    **options.template_args,
                )
            )
        # A template is a program: on messages that it does not foresee it raises anything.
        except Exception as error:
            raise RequestError(
                f"The model's chat template refuses the messages: {error}", param="messages"
            ) from error

    def _shield(self, value: Any, literals: list[str]) -> Any:
        """A copy in which placeholders, which templates pass through, stand for control text."""
        if isinstance(value, Mapping):
            return {
                self._shield(key, literals): self._shield(item, literals)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._shield(item, literals) for item in value]
        if not isinstance(value, str):
            return value

        def keep(match: re.Match[str]) -> str:
            literals.append(match[0])
            return _PLACEHOLDER.format(len(literals) - 1)

        return self._kept_apart.sub(keep, value)


def _source(template: Any) -> str:
    """Some models have several templates by name."""
    if isinstance(template, Mapping):
        return "\n".join(str(text) for text in template.values())
    return template or ""
