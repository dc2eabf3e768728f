"""Grammars of answers that are, or may be, tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pydantic_core

from engine.config import LimitsConfig
from engine.request import GrammarSpec, Prelude, RequestError
from server.apis.shared.schema.tools import NamedToolChoice
from server.json_schema.keywords import SchemaError
from server.json_schema.prepare import prepare_schema
from server.limits import check_size
from server.parsing import hermes
from server.parsing.answer import CallForm

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As the engine spaces JSON, and chat templates the calls that models learn from."""

_MORE_PROPERTIES = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "$ref"),
        *("allOf", "anyOf", "oneOf", "if", "dependentSchemas", "propertyNames"),
    }
)
"""Keys of a schema that may allow properties which it doesn't list itself."""


class TagTokenizer(Protocol):
    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A tool choice that leaves the model no other answer than calls."""

    name: str | None = None
    """The one tool to call, once; None: any of them."""


@dataclass(frozen=True, slots=True)
class TagTokens:
    """The tokens that a vocabulary has for the tags around a call."""

    opening: int
    closing: int

    @classmethod
    def find(cls, tokenizer: TagTokenizer) -> TagTokens | None:
        """None: the tags are spelled with tokens of other text, or are none that show in text."""
        ids = []
        for tag in (hermes.OPEN_TAG, hermes.CLOSE_TAG):
            found = tokenizer.encode(tag, add_special_tokens=False)
            if len(found) != 1 or found[0] in tokenizer.special_ids:
                return None
            if tokenizer.token_bytes[found[0]] != tag.encode():
                return None
            ids += found
        return cls(*ids)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The calls an answer may hold."""

    tools: Sequence[Mapping[str, Any]]
    """As chat templates are given them (OpenAI's shape); at least one."""
    form: CallForm
    """How the model writes calls (`AnswerFormat.calls`)."""
    max_calls: int | None = None
    forced: ForcedCall | None = None
    """None: the model decides whether to call."""
    tags: TagTokens | None = None


@dataclass(frozen=True, slots=True)
class PreparedTool:
    """A tool with a schema of its arguments that can be enforced."""

    name: str
    param: str
    """Where its schema is in the request, as OpenAI has it."""
    given: Mapping[str, Any]
    strict: bool
    schema: Mapping[str, Any]
    not_enforced: tuple[str, ...]


def forced_call(choice: str | NamedToolChoice | None) -> ForcedCall | None:
    """What a tool choice forces the model to call; None: nothing."""
    if isinstance(choice, NamedToolChoice):
        return ForcedCall(choice.function.name)
    return ForcedCall() if choice == "required" else None


def prepared_tools(calls: ToolCalls, limits: LimitsConfig) -> list[PreparedTool]:
    """The tools that the answer may call.

    Raises:
        RequestError: their schemas are too large together, or one is none; names the tool and
            the place.
    """
    name = None if calls.forced is None else calls.forced.name
    called = {
        number: tool["function"]
        for number, tool in enumerate(calls.tools)
        if name in (None, tool["function"]["name"])
    }
    schemas = [function.get("parameters") for function in called.values()]
    check_size(pydantic_core.to_json(schemas), limits, "tools")
    return [
        _prepared(function, f"tools.{number}.function.parameters")
        for number, function in called.items()
    ]


def grammar_for_tools(
    calls: ToolCalls, tools: Sequence[PreparedTool], prelude: Prelude | None = None
) -> GrammarSpec:
    """The grammar of an answer that consists of tool calls alone.

    Args:
        tools: the ones to call; a forced one is called once.
    """
    return GrammarSpec("rules", "\n".join(["start: calls", *_call_rules(calls, tools)]), prelude)


def calls_or_answer(
    calls: ToolCalls,
    tools: Sequence[PreparedTool],
    answer: Mapping[str, Any],
    prelude: Prelude | None,
) -> GrammarSpec:
    """The grammar of an answer that is either tool calls or JSON.

    Args:
        answer: prepared schema of the JSON.
    """
    rules = ["start: answer | calls", f"answer: %json {_styled(answer)}"]
    return GrammarSpec("rules", "\n".join([*rules, *_call_rules(calls, tools)]), prelude)


def tool_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments; none given: there are none.

    Functions fail on arguments they don't know, so a plain list of properties is taken as whole
    where it doesn't say: narrower than JSON Schema, and as OpenAI's strict tools have it.
    """
    schema = dict(function.get("parameters") or {"type": "object", "properties": {}})
    if isinstance(schema.get("properties"), Mapping) and not _MORE_PROPERTIES & schema.keys():
        schema["unevaluatedProperties"] = False
    return schema


def _prepared(function: Mapping[str, Any], param: str) -> PreparedTool:
    name, strict = function["name"], bool(function.get("strict"))
    given = tool_schema(function)
    try:
        prepared = prepare_schema(given, closed=strict)
    except SchemaError as error:
        raise RequestError(
            f"Invalid value for '{param}': tool '{name}': {error.told}.", param=param
        ) from error
    return PreparedTool(name, param, given, strict, prepared.schema, prepared.not_enforced)


def _call_rules(calls: ToolCalls, tools: Sequence[PreparedTool]) -> list[str]:
    """Lark rules that define `calls`.

    Text behind a call must not be where a model is led to another one. The separator may come
    last, because a token can hold the end of the tag along with it; and where the tags are tokens
    of their own they come as those, so that no part of one speaks for the whole.
    """
    is_hermes = calls.form == "hermes"
    separator, line = ("\n", "\n") if is_hermes else ("; ", "")
    key = "arguments" if is_hermes else "parameters"
    opening, closing = _tags(calls.tags) if is_hermes else ([], [])
    rules = [
        f"calls: call{_more_calls(calls)}",
        f"separator: {_quoted(separator)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
    ]
    for number, tool in enumerate(tools):
        head = _quoted(f'{line}{{"name": {json.dumps(tool.name)}, "{key}": ')
        parts = [*opening, head, f"arguments_{number}", _quoted("}" + line), *closing]
        rules.append(f"call_{number}: " + " ".join(parts))
        rules.append(f"arguments_{number}: %json {_styled(tool.schema)}")
    return rules


def _more_calls(calls: ToolCalls) -> str:
    if calls.max_calls == 1 or (calls.forced is not None and calls.forced.name is not None):
        return ""
    times = "*" if calls.max_calls is None else f"{{0,{calls.max_calls - 1}}}"
    return f" (separator call){times} separator?"


def _tags(tokens: TagTokens | None) -> tuple[list[str], list[str]]:
    if tokens is None:
        return [_quoted(hermes.OPEN_TAG)], [_quoted(hermes.CLOSE_TAG)]
    return [f"<[{tokens.opening}]>"], [f"<[{tokens.closing}]>"]


def _quoted(text: str) -> str:
    return json.dumps(text)


def _styled(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _JSON_STYLE})
