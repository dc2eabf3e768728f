"""From a model's raw text to the parts of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.request import Prelude, RequestError, RequestOutput
from server.parsing import hermes, reasoning
from server.parsing.deltas import Delta, ToolCallStart, ToolParser, text_deltas
from server.parsing.hermes import HermesParser
from server.parsing.json_blocks import JsonBlockParser
from server.parsing.llama_json import LlamaJsonParser
from server.parsing.reasoning import ReasoningSplitter, ReasoningTokens

_LLAMA_MARKS = ("<|python_tag|>", '"parameters": dictionary of argument name')
_OTHER_CALL_FORMS = ("<function=", "[TOOL_CALLS]", "<|channel|>")


CallForm = Literal["hermes", "llama"]


class AnswerParser:
    """Reads one choice's outputs; the same deltas make streams and whole responses."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None,
        tools: ToolParser | None,
        token_bytes: Sequence[bytes],
    ) -> None:
        self._splitter = splitter
        self._tools = tools
        self._reasoning = ReasoningTokens(token_bytes)
        self.num_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        if self._splitter is None or not self._splitter.has_reasoning:
            return 0
        return self._reasoning.count

    def take(self, output: RequestOutput) -> list[Delta]:
        """What an output adds; an output that ends the choice also brings what was held back."""
        self._reasoning.add(output.token_ids)
        deltas = self._feed(output.text)
        if output.finish_reason is not None:
            deltas += self._finish()
        self.num_calls += sum(isinstance(delta, ToolCallStart) for delta in deltas)
        return deltas

    def _feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        if self._splitter is not None:
            deltas, text = self._splitter.feed(text)
        if self._tools is None:
            return deltas + text_deltas(text)
        return deltas + self._tools.feed(text)

    def _finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        if self._splitter is not None:
            deltas, text = self._splitter.finish()
            deltas += text_deltas(text) if self._tools is None else self._tools.feed(text)
        return deltas if self._tools is None else deltas + self._tools.finish()


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers, as far as its chat template tells."""

    thinks: bool
    starts_inside_thinking: bool
    calls: CallForm | None
    """"hermes", "llama" or None: no calls are looked for."""
    tool_names: frozenset[str]
    max_calls: int | None
    token_bytes: Sequence[bytes]

    @classmethod
    def of(
        cls,
        template: str,
        prompt_end: bytes,
        *,
        tool_names: frozenset[str],
        max_calls: int | None,
        token_bytes: Sequence[bytes],
    ) -> AnswerFormat:
        """
        Args:
            template: source of the chat template.
            prompt_end: the last bytes of the prompt.
            tool_names: tools the model may call; empty: none.
            token_bytes: bytes by token id.

        Raises:
            RequestError: there are tools, but the template has no form of calls known here.
        """
        thinks = reasoning.CLOSE_TAG in template
        return cls(
            thinks=thinks,
            starts_inside_thinking=thinks
            and prompt_end.rstrip().endswith(reasoning.OPEN_TAG.encode()),
            calls=_call_form(template) if tool_names else None,
            tool_names=tool_names,
            max_calls=max_calls,
            token_bytes=token_bytes,
        )

    @property
    def prelude(self) -> Prelude | None:
        """The thinking that comes, or may come, before the answer proper."""
        if not self.thinks:
            return None
        start = None if self.starts_inside_thinking else reasoning.OPEN_TAG
        return Prelude(reasoning.CLOSE_TAG, start)

    def parser(self) -> AnswerParser:
        """A parser for one choice."""
        splitter = None
        if self.thinks:
            splitter = ReasoningSplitter(starts_inside=self.starts_inside_thinking)
        return AnswerParser(splitter, self._tool_parser(), self.token_bytes)

    def _tool_parser(self) -> ToolParser | None:
        names, limit = self.tool_names, self.max_calls
        match self.calls:
            case "hermes":
                hermes_parser = HermesParser(max_calls=limit)
                return JsonBlockParser(names, hermes_parser, reads_bare=True, max_calls=limit)
            case "llama":
                llama_parser = LlamaJsonParser(names, max_calls=limit)
                return JsonBlockParser(names, llama_parser, reads_bare=False, max_calls=limit)
        return None


def _call_form(template: str) -> CallForm:
    if not any(mark in template for mark in _OTHER_CALL_FORMS):
        if hermes.OPEN_TAG in template:
            return "hermes"
        if any(mark in template for mark in _LLAMA_MARKS):
            return "llama"
    raise RequestError(
        "The model's chat template has no form of tool calls that this server can read.",
        param="tools",
        code="unsupported_parameter",
    )
