"""What a request's fields demand of its output, whichever server's fields they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.config import LimitsConfig
from engine.request import GrammarKind, GrammarSpec, RequestError
from server.apis.shared.schema.structured import (
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    StructuredFields,
    StructuredOutputs,
    TypedGrammar,
)
from server.json_schema.keywords import SchemaError
from server.json_schema.prepare import prepare_schema
from server.limits import at_most, check_size, parsed_schema

Schema = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Constraint:
    """One field's demand."""

    param: str
    kind: GrammarKind
    value: Any = ""
    """By kind: as `GrammarSpec.text`, but a schema may be an object, and choices are a list."""
    strict: bool = False
    """Whether objects are closed that leave open what else they hold."""

    @property
    def is_json(self) -> bool:
        return self.kind in ("json_object", "json_schema")


@dataclass(frozen=True, slots=True)
class PreparedConstraint:
    spec: GrammarSpec
    given: Mapping[str, Any] = field(default_factory=dict)
    """The schema as the client sent it, if it is one."""
    not_enforced: tuple[str, ...] = ()
    """Keywords of the schema that the output may violate, as JSON pointers."""


def constraints(fields: StructuredFields) -> Iterator[Constraint]:
    """Every field that constrains the output.

    Raises:
        RequestError: a field doesn't say what it demands.
    """
    yield from _of_response_format(fields.response_format)
    for param, schema in (("json_schema", fields.json_schema), ("guided_json", fields.guided_json)):
        if schema is not None:
            yield Constraint(param, "json_schema", schema)
    if fields.format == "json":
        yield Constraint("format", "json_object")
    elif fields.format:
        yield Constraint("format", "json_schema", fields.format)
    if isinstance(fields.grammar, TypedGrammar):
        yield _of_typed_grammar(fields.grammar)
    texts: Sequence[tuple[str, GrammarKind, Any]] = (
        ("grammar", "lark", None if isinstance(fields.grammar, TypedGrammar) else fields.grammar),
        ("ebnf", "lark", fields.ebnf),
        ("guided_grammar", "lark", fields.guided_grammar),
        ("regex", "regex", fields.regex),
        ("guided_regex", "regex", fields.guided_regex),
        ("guided_choice", "choice", fields.guided_choice),
    )
    yield from (Constraint(*text) for text in texts if text[2] is not None)
    if fields.structured_outputs is not None:
        yield from _of_structured_outputs(fields.structured_outputs)


def prepare_constraint(constraint: Constraint, limits: LimitsConfig) -> PreparedConstraint:
    """The grammar that a constraint asks for; takes as long as its size.

    Raises:
        RequestError: it is over a limit, or a schema that is none.
    """
    param = constraint.param
    match constraint.kind:
        case "json_object":
            return PreparedConstraint(GrammarSpec("json_object"))
        case "choice":
            at_most(len(constraint.value), limits.max_guided_choices, param, "entries")
            text = json.dumps(constraint.value)
        case "json_schema":
            schema = parsed_schema(constraint.value, limits, param)
            try:
                prepared = prepare_schema(schema, closed=constraint.strict)
            except SchemaError as error:
                raise RequestError(
                    f"Invalid value for '{param}': {error.told}.", param=param
                ) from error
            spec = GrammarSpec("json_schema", json.dumps(prepared.schema))
            return PreparedConstraint(spec, schema, prepared.not_enforced)
        case _:
            text = constraint.value
    check_size(text, limits, param)
    return PreparedConstraint(GrammarSpec(constraint.kind, text))


def _of_response_format(chosen: Any) -> Iterator[Constraint]:
    param = "response_format"
    match chosen:
        case JsonObjectFormat():
            found = _only(chosen, {"schema": chosen.json_schema, "value": chosen.value})
            if found is None:
                yield Constraint(param, "json_object")
            else:
                yield Constraint(f"{param}.{found[0]}", "json_schema", found[1])
        case JsonSchemaFormat(json_schema=named, bare_schema=bare):
            found = _only(chosen, {"json_schema": named, "schema": bare})
            if found is None:
                raise RequestError(
                    f"Missing required parameter: '{param}.json_schema'.",
                    param=f"{param}.json_schema",
                )
            if named is None:
                yield Constraint(f"{param}.schema", "json_schema", bare)
            else:
                schema = {} if named.json_schema is None else named.json_schema
                where = f"{param}.json_schema.schema"
                yield Constraint(where, "json_schema", schema, strict=bool(named.strict))
        case RegexFormat(pattern=pattern, regex=regex, value=value):
            yield _text(chosen, "regex", {"pattern": pattern, "regex": regex, "value": value})
        case GrammarFormat(grammar=grammar, ebnf=ebnf):
            yield _text(chosen, "lark", {"grammar": grammar, "ebnf": ebnf})


def _text(chosen: Any, kind: GrammarKind, values: Mapping[str, Any]) -> Constraint:
    found = _only(chosen, values)
    if found is None:
        names = " or ".join(f"'{name}'" for name in values)
        raise RequestError(
            f"A 'response_format' of type '{chosen.type}' must have {names}.",
            param="response_format",
        )
    return Constraint(f"response_format.{found[0]}", kind, found[1])


def _only(chosen: Any, values: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The one field that is set; several servers call it differently."""
    found = [(name, value) for name, value in values.items() if value is not None]
    if len(found) > 1:
        raise RequestError(
            f"'response_format.{found[0][0]}' and 'response_format.{found[1][0]}' say the same of "
            f"type '{chosen.type}'; set only one of them.",
            param=f"response_format.{found[1][0]}",
        )
    return found[0] if found else None


def _of_typed_grammar(grammar: TypedGrammar) -> Constraint:
    if grammar.type == "json":
        return Constraint("grammar.value", "json_schema", grammar.value)
    if isinstance(grammar.value, str):
        return Constraint("grammar.value", "regex", grammar.value)
    raise RequestError("'grammar.value' must be a regular expression.", param="grammar.value")


def _of_structured_outputs(options: StructuredOutputs) -> Iterator[Constraint]:
    prefix = "structured_outputs."
    found = []
    if options.json_schema is not None:
        strict = bool(options.disable_additional_properties)
        found.append(Constraint(f"{prefix}json", "json_schema", options.json_schema, strict))
    if options.regex is not None:
        found.append(Constraint(f"{prefix}regex", "regex", options.regex))
    if options.choice is not None:
        found.append(Constraint(f"{prefix}choice", "choice", options.choice))
    if options.grammar is not None:
        found.append(Constraint(f"{prefix}grammar", "lark", options.grammar))
    if options.json_object:
        found.append(Constraint(f"{prefix}json_object", "json_object"))
    if not found:
        raise RequestError(
            "'structured_outputs' must hold one of 'json', 'regex', 'choice', 'grammar' and "
            "'json_object'.",
            param="structured_outputs",
        )
    yield from found
