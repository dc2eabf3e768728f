"""From a request's structured-output fields and tools to the engine's grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.config import LimitsConfig
from engine.request import GrammarSpec, Prelude, RequestError
from server.context import ServerContext
from server.limits import at_most, check_schema_text
from server.parsing import hermes
from server.parsing.answer import CallForm
from server.schemas.structured import (
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredFields,
    StructuredOutputs,
)
from server.schemas.tools import NamedToolChoice
from server.unsupported import UNSUPPORTED_STRUCTURED_OUTPUTS, refuse_unsupported

if TYPE_CHECKING:
    from engine.sampling.grammar_compiler import CompiledGrammar

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As the engine spaces JSON, and chat templates the calls that models learn from."""

_MORE_PROPERTIES = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "$ref"),
        *("allOf", "anyOf", "oneOf", "if", "dependentSchemas"),
    }
)
"""Keys of a schema that may allow properties which it doesn't list itself."""


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A tool choice that leaves the model no other answer than calls."""

    name: str | None = None
    """The one tool to call, once; None: any of them."""


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


async def prepare_grammar(
    fields: StructuredFields,
    context: ServerContext,
    prelude: Prelude | None = None,
    calls: ToolCalls | None = None,
) -> CompiledGrammar | None:
    """What the output must match; None: nothing.

    Args:
        prelude: free text that may come first, such as a model's reasoning.
        calls: what the model may write instead of JSON that is asked for. If they are forced,
            a `response_format` is no contradiction, as at OpenAI: there is no text to format.

    Raises:
        RequestError: two fields constrain the output, or one can't be used; names it.
    """
    wanted = list(_wanted(fields, context.config.limits))
    forced = None if calls is None else calls.forced
    if calls is not None and forced is not None:
        wanted = [entry for entry in wanted if not entry[0].startswith("response_format")]
        wanted.append(("tool_choice", grammar_for_tools(calls, forced.name)))
    if not wanted:
        return None
    (param, spec), *others = wanted
    if others:
        other = others[0][0]
        raise RequestError(
            f"'{param}' and '{other}' both constrain the output; set only one of them.",
            param=other,
        )
    grammar = await compile_grammar(replace(spec, prelude=prelude), context, param)
    if calls is None or forced is not None or spec.kind not in ("json_object", "json_schema"):
        return grammar
    schema = json.loads(spec.text) if spec.text else {"type": "object"}
    rules = ["start: answer | calls", f"answer: %json {_styled(schema)}", *_call_rules(calls)]
    return await compile_grammar(GrammarSpec("rules", "\n".join(rules), prelude), context, param)


async def compile_grammar(spec: GrammarSpec, context: ServerContext, param: str) -> CompiledGrammar:
    """Have the engine make a grammar ready.

    Raises:
        RequestError: it is too large or can't be used; names `param`.
    """
    limits: LimitsConfig = context.config.limits
    size = len(spec.text.encode())
    if size > limits.max_schema_bytes:
        raise RequestError(
            f"'{param}' has {size} bytes; the limit is {limits.max_schema_bytes}.", param=param
        )
    if spec.kind == "json_schema":
        check_schema_text(spec.text, limits, param)
    try:
        return await context.engine.compile_grammar(spec, time_limit=limits.max_schema_seconds)
    except RequestError as error:
        raise RequestError(f"Invalid value for '{param}': {error}", param=param) from error


def forced_call(choice: str | NamedToolChoice | None) -> ForcedCall | None:
    """What a tool choice forces the model to call; None: nothing."""
    if isinstance(choice, NamedToolChoice):
        return ForcedCall(choice.function.name)
    return ForcedCall() if choice == "required" else None


def grammar_for_tools(
    calls: ToolCalls, name: str | None, prelude: Prelude | None = None
) -> GrammarSpec:
    """The grammar of an answer that consists of tool calls alone.

    Args:
        name: the one tool to call, once; None: any of them.
    """
    if name is not None:
        named = [tool for tool in calls.tools if tool["function"]["name"] == name]
        calls = replace(calls, tools=named, max_calls=1)
    rules = ["start: calls", *_call_rules(calls)]
    return GrammarSpec("rules", "\n".join(rules), prelude)


def tool_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments; none given: there are none.

    Functions fail on arguments they don't know, so a plain list of properties is taken as whole
    where it doesn't say: narrower than JSON Schema, and as OpenAI's strict tools have it.
    """
    schema = dict(function.get("parameters") or {"type": "object", "properties": {}})
    if "properties" in schema and not _MORE_PROPERTIES & schema.keys():
        schema["additionalProperties"] = False
    return schema


def _call_rules(calls: ToolCalls) -> list[str]:
    """Lark rules that define `calls`."""
    if calls.form == "hermes":
        opening, closing = f"{hermes.OPEN_TAG}\n", f"\n{hermes.CLOSE_TAG}"
        separator, key = "\n", "arguments"
    else:
        opening, closing, separator, key = "", "", "; ", "parameters"
    times = "*" if calls.max_calls is None else f"{{0,{calls.max_calls - 1}}}"
    more = "" if calls.max_calls == 1 else f" ({json.dumps(separator)} call){times}"
    functions = [tool["function"] for tool in calls.tools]
    rules = [
        f"calls: call{more}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(functions))),
    ]
    for number, function in enumerate(functions):
        head = json.dumps(f'{opening}{{"name": {json.dumps(function["name"])}, "{key}": ')
        tail = json.dumps("}" + closing)
        rules.append(f"call_{number}: {head} arguments_{number} {tail}")
        rules.append(f"arguments_{number}: %json {_styled(tool_schema(function))}")
    return rules


def _styled(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _JSON_STYLE})


def _wanted(fields: StructuredFields, limits: LimitsConfig) -> Iterator[tuple[str, GrammarSpec]]:
    """Every field that constrains the output."""
    match fields.response_format:
        case JsonObjectFormat():
            yield "response_format", GrammarSpec("json_object")
        case JsonSchemaFormat() as chosen:
            schema = chosen.json_schema.json_schema
            yield "response_format.json_schema.schema", _schema({} if schema is None else schema)
    if fields.guided_json is not None:
        yield "guided_json", _schema(fields.guided_json)
    if fields.guided_regex is not None:
        yield "guided_regex", GrammarSpec("regex", fields.guided_regex)
    if fields.guided_choice is not None:
        yield "guided_choice", _choice(fields.guided_choice, limits, "guided_choice")
    if fields.guided_grammar is not None:
        yield "guided_grammar", GrammarSpec("lark", fields.guided_grammar)
    if fields.structured_outputs is not None:
        yield from _of_structured_outputs(fields.structured_outputs, limits)


def _of_structured_outputs(
    options: StructuredOutputs, limits: LimitsConfig
) -> Iterator[tuple[str, GrammarSpec]]:
    prefix = "structured_outputs."
    refuse_unsupported(options.model_extra, UNSUPPORTED_STRUCTURED_OUTPUTS, prefix=prefix)
    found = []
    if options.json_schema is not None:
        found.append((f"{prefix}json", _schema(options.json_schema)))
    if options.regex is not None:
        found.append((f"{prefix}regex", GrammarSpec("regex", options.regex)))
    if options.choice is not None:
        param = f"{prefix}choice"
        found.append((param, _choice(options.choice, limits, param)))
    if options.grammar is not None:
        found.append((f"{prefix}grammar", GrammarSpec("lark", options.grammar)))
    if options.json_object:
        found.append((f"{prefix}json_object", GrammarSpec("json_object")))
    if not found:
        raise RequestError(
            "'structured_outputs' must hold one of 'json', 'regex', 'choice', 'grammar' and "
            "'json_object'.",
            param="structured_outputs",
        )
    yield from found


def _choice(choices: Sequence[str], limits: LimitsConfig, param: str) -> GrammarSpec:
    at_most(len(choices), limits.max_guided_choices, param, "entries")
    return GrammarSpec("choice", json.dumps(choices))


def _schema(schema: str | Mapping[str, Any]) -> GrammarSpec:
    return GrammarSpec("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
