"""Schemas as people send them: what is enforced is, and what isn't is told."""

from __future__ import annotations

import copy
import json
import random
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, Field, SecretStr, StringConstraints

from engine.request import RequestError
from server.json_schema.keywords import SchemaError
from server.json_schema.numbers import FARTHEST
from server.json_schema.prepare import prepare_schema
from tests.structured.engines import Walk, grammars, json_schema, tokenizer
from tests.structured.schemas import SCHEMAS, closed

TEXT = {"type": "string"}
COUNT = {"type": "integer"}
POINT = {"type": "object", "properties": {"x": COUNT}, "required": ["x"]}


def allows(schema: Any, value: str, *, is_closed: bool = False) -> bool:
    """Whether the grammar of a prepared schema allows a text."""
    walk = Walk(json_schema(prepare_schema(schema, closed=is_closed).schema))
    ids = tokenizer().encode_continuation(value)
    assert ids is not None
    return walk.num_allowed([*ids, min(tokenizer().eos_ids)]) == len(ids) + 1


def not_enforced(schema: Any) -> tuple[str, ...]:
    return prepare_schema(schema).not_enforced


ANNOTATIONS = [
    {"type": "string", "format": "binary"},
    {"type": "string", "format": "no-such-format"},
    {"type": "integer", "format": "int64"},
    {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "http://a/b", "type": "string"},
    {"type": "string", "title": "T", "description": None, "deprecated": True, "examples": ["a"]},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": TEXT},
    {"type": "array", "uniqueItems": False, "items": TEXT},
    {"x-order": 3, "type": "string", "discriminator": {"propertyName": "a"}, "nullable": True},
]


@pytest.mark.parametrize("schema", ANNOTATIONS)
def test_annotations_are_no_reason_to_refuse_a_schema(schema: dict[str, Any]) -> None:
    prepared = prepare_schema(schema)
    assert prepared.not_enforced == ()
    grammars().compile(json_schema(prepared.schema))


TAGS = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}
ENFORCED = [
    (TAGS, ['["c", "a"]', "[]"], ['["a", "a"]', '["a", "b", "c", "a"]']),
    (
        {**TAGS, "minItems": 2, "maxItems": 2},
        ['["b", "a"]'],
        ['["b"]', '["b", "b"]', '["a", "b", "c"]'],
    ),
    ({"uniqueItems": True, "items": {"type": "boolean"}}, ["[true]", '"x"', "3"], ["[true, true]"]),
    (
        {"type": ["array", "null"], "items": {"const": 3}, "uniqueItems": True},
        ["null", "[3]"],
        ["[3, 3]", "3"],
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": COUNT},
        ['{"a": 1, "b": 2}', "{}"],
        ['{"c": 1}', '{"a": "x"}', '{"a": 1, "a": 2}'],
    ),
    (
        {
            "$defs": {"K": {"enum": ["a", "b"], "title": "K"}},
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/K"},
            "additionalProperties": COUNT,
        },
        ['{"b": 2}'],
        ['{"c": 1}'],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^x_"}, "additionalProperties": COUNT},
        ['{"x_a": 1}'],
        ['{"y": 1}', '{"x_a": "1"}'],
    ),
    (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": COUNT},
        ['{"ab": 1}'],
        ['{"abc": 1}'],
    ),
    ({"type": "object", "propertyNames": False}, ["{}"], ['{"a": 1}']),
    (
        {"type": "object", "patternProperties": {"^(a|b)$": COUNT}, "additionalProperties": False},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1, "a": 2}', '{"c": 1}'],
    ),
    ({"oneOf": [COUNT, TEXT]}, ["1", '"a"'], ["null"]),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ['"a"'], ['"c"']),
    (
        {"oneOf": [closed(kind={"const": "a"}, x=COUNT), closed(kind={"const": "b"}, y=TEXT)]},
        ['{"kind": "b", "y": "z"}'],
        ['{"kind": "a", "y": "z"}'],
    ),
    ({"anyOf": [{"type": "string"}, {"not": {}}]}, ['"a"'], ["1"]),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    (
        {"type": "array", "items": [COUNT, TEXT], "additionalItems": False},
        ['[1, "a"]'],
        ['[1, "a", 2]'],
    ),
    ({"$defs": {"a": {"$anchor": "here", **COUNT}}, "$ref": "#here"}, ["1"], ['"a"']),
    (
        {"components": {"schemas": {"P": POINT}}, "$ref": "#/components/schemas/P"},
        ['{"x": 1}'],
        ["{}"],
    ),
    ({"type": "object", "properties": {"c": {"$ref": "#"}}}, ['{"c": {"c": {}}}'], ['{"c": 1}']),
    (
        {"allOf": [POINT, {"properties": {"y": COUNT}}], "unevaluatedProperties": False},
        ['{"x": 1, "y": 2}'],
        ['{"x": 1, "z": 2}'],
    ),
    ({"type": "object", "properties": {"a": COUNT}, "minProperties": 0}, ["{}"], ["1"]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), ENFORCED)
def test_what_can_be_enforced_is(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    assert not_enforced(schema) == ()
    assert [value for value in right if not allows(schema, value)] == []
    assert [value for value in wrong if allows(schema, value)] == []


REPORTED = [
    ({"type": "array", "items": TEXT, "uniqueItems": True}, "/uniqueItems"),
    ({"oneOf": [COUNT, {"type": "number"}]}, "/oneOf"),
    ({"oneOf": [POINT, {"type": "object"}]}, "/oneOf"),
    ({"type": "string", "pattern": "^(?!a)b"}, "/pattern"),
    ({"type": "string", "pattern": r"(a)\1"}, "/pattern"),
    ({"type": "string", "pattern": r"\bword\b"}, "/pattern"),
    ({"properties": {"a/b": {"not": TEXT}}}, "/properties/a~1b/not"),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "/if"),
    ({"type": "array", "contains": {"const": 1}}, "/contains"),
    ({"dependentRequired": {"a": ["b"]}}, "/dependentRequired"),
    ({"type": "object", "properties": {"a": COUNT}, "minProperties": 1}, "/minProperties"),
    ({"patternProperties": {"(?=a)": COUNT}}, "/patternProperties/(?=a)"),
    ({"propertyNames": {"allOf": [{"pattern": "a"}]}}, "/propertyNames"),
    ({"$defs": {"a": {"not": TEXT}}, "items": {"$ref": "#/$defs/a"}}, "/$defs/a/not"),
]


@pytest.mark.parametrize(("schema", "pointer"), REPORTED)
def test_what_can_not_be_enforced_is_told(schema: dict[str, Any], pointer: str) -> None:
    assert not_enforced(schema) == (pointer,)
    grammars().compile(json_schema(prepare_schema(schema).schema))


def test_repetition_is_at_least_bounded_where_there_are_many_values() -> None:
    many = {"type": "array", "items": {"enum": list(range(9))}, "uniqueItems": True}
    assert prepare_schema(many).schema["maxItems"] == 9
    assert not_enforced(many) == ("/uniqueItems",)


BROKEN = [
    ({"type": "strange"}, "/type"),
    ({"properties": {"a": {"items": {"type": "any"}}}}, "/properties/a/items/type"),
    ({"properties": [1]}, "/properties"),
    ({"properties": {"a": 3}}, "/properties/a"),
    ({"required": "a"}, "/required"),
    ({"minLength": -1}, "/minLength"),
    ({"multipleOf": 0}, "/multipleOf"),
    ({"enum": []}, "/enum"),
    ({"anyOf": []}, "/anyOf"),
    ({"items": {"$ref": "#/$defs/x"}}, "/items/$ref"),
    ({"$ref": "http://127.0.0.1:9/a.json"}, "/$ref"),
    ({"$ref": "other.json#/a"}, "/$ref"),
    ({"$ref": "#nowhere"}, "/$ref"),
    ({"$dynamicRef": "#a"}, "/$dynamicRef"),
    ({**TAGS, "minItems": 4}, "/uniqueItems"),
]


@pytest.mark.parametrize(("schema", "pointer"), BROKEN)
def test_what_is_no_schema_is_refused_with_its_place(schema: dict[str, Any], pointer: str) -> None:
    with pytest.raises(SchemaError) as caught:
        prepare_schema(schema)
    assert caught.value.pointer == pointer
    assert caught.value.reason


@pytest.mark.parametrize(
    "bounds",
    [{}, {"minimum": 0}, {"exclusiveMaximum": 7}, {"minimum": 0, "maximum": 2**64 - 1}],
)
@pytest.mark.parametrize("kind", ["integer", ["integer", "null"]])
def test_integers_have_at_most_19_digits(kind: Any, bounds: dict[str, Any]) -> None:
    schema = {"type": kind, **bounds}
    assert not allows(schema, "9" * 20)
    assert not allows(schema, "-" + "9" * 20)
    assert allows(schema, "5")
    assert allows(schema, "1234567890123456789") == ("exclusiveMaximum" not in bounds)


def test_bounds_of_ones_own_stand() -> None:
    assert prepare_schema({"type": "integer", "minimum": 3, "maximum": 5}).schema == {
        "type": "integer",
        "minimum": 3,
        "maximum": 5,
    }
    assert prepare_schema({"type": "number"}).schema == {"type": "number"}
    assert prepare_schema(COUNT).schema == {**COUNT, "minimum": -FARTHEST, "maximum": FARTHEST}


BOOK = {
    "type": "object",
    "properties": {
        "title": TEXT,
        "author": {"type": "object", "properties": {"name": TEXT}},
        "tags": {"type": "array", "items": {"type": "object", "properties": {"t": COUNT}}},
        "extra": {"type": "object"},
        "more": {"type": "object", "properties": {"a": COUNT}, "additionalProperties": COUNT},
    },
}
CLOSED = [
    (
        BOOK,
        ['{"title": "x"}', '{"extra": {"a": 1}}', '{"more": {"b": 1}}'],
        ['{"pages": 3}', '{"author": {"age": 1}}', '{"tags": [{"u": 1}]}'],
    ),
    (
        {"$defs": {"B": BOOK}, "type": "array", "items": {"$ref": "#/$defs/B"}},
        ['[{"title": "x"}]'],
        ['[{"pages": 3}]', '[{"author": {"age": 1}}]'],
    ),
    (
        {"anyOf": [POINT, {"type": "object", "properties": {"y": COUNT}}]},
        ['{"x": 1}', '{"y": 1}'],
        ['{"x": 1, "y": 1}', '{"z": 1}'],
    ),
    (
        {"allOf": [POINT, {"properties": {"y": POINT}}]},
        ['{"x": 1, "y": {"x": 1}}'],
        ['{"x": 1, "z": 1}', '{"x": 1, "y": {"x": 1, "z": 1}}'],
    ),
    (
        {"$defs": {"P": POINT}, "$ref": "#/$defs/P", "properties": {"y": {"$ref": "#/$defs/P"}}},
        ['{"y": {"x": 1}, "x": 1}', '{"x": 1}'],
        ['{"x": 1, "z": 1}', '{"x": 1, "y": {"x": 1, "z": 1}}'],
    ),
    ({"$defs": {"P": POINT}, "allOf": [{"$ref": "#/$defs/P"}]}, ['{"x": 1}'], ['{"x": 1, "z": 1}']),
    (
        {"type": "object", "properties": {"a": COUNT}, "required": ["a", "b"]},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}'],
    ),
    (
        {"type": "object", "properties": {"a": COUNT}, "patternProperties": {"^x": COUNT}},
        ['{"a": 1, "xy": 1}'],
        ['{"b": 1}'],
    ),
    (
        {**POINT, "anyOf": [{"required": ["x"]}, {"properties": {"y": COUNT}, "required": ["y"]}]},
        ['{"x": 1}', '{"x": 1, "y": 2}'],
        ['{"x": 1, "z": 2}'],
    ),
    (
        {"type": "object", "properties": {"c": {"$ref": "#"}}},
        ['{"c": {"c": {}}}'],
        ['{"c": {"d": 1}}'],
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CLOSED)
def test_closed_objects_hold_what_they_list(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    assert [value for value in right if not allows(schema, value, is_closed=True)] == []
    assert [value for value in wrong if allows(schema, value, is_closed=True)] == []


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    owner: Person | None = None


class Person(BaseModel):
    id: UUID
    born: datetime
    photo: bytes
    password: SecretStr
    site: AnyUrl
    nicknames: set[str]
    moods: set[Colour]
    shades: dict[Colour, int]
    codes: dict[Annotated[str, StringConstraints(pattern="^[a-z]{2}$")], float]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    at: tuple[int, int]
    email: Annotated[str, Field(json_schema_extra={"format": "email", "pattern": "^(?!\\.).+@.+$"})]


def test_a_model_of_pydantic() -> None:
    schema = Person.model_json_schema()
    prepared = prepare_schema(schema, closed=True)
    assert prepared.not_enforced == (
        "/$defs/Person/properties/nicknames/uniqueItems",
        "/$defs/Person/properties/email/pattern",
    )
    grammars().compile(json_schema(prepared.schema))


ZOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "email": {
            "type": "string",
            "format": "email",
            "pattern": "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@[a-z.]+$",
        },
        "id": {"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"},
        "n": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        "r": {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "number"},
            "required": ["a", "b"],
        },
        "any": {},
        "never": {"not": {}},
        "pick": {"anyOf": [{"type": "string", "const": "x"}, {"type": "null"}]},
    },
    "required": ["email", "id", "n", "r", "any", "pick"],
    "additionalProperties": False,
}
"""As zod 4 writes them."""


def test_a_schema_of_zod() -> None:
    prepared = prepare_schema(ZOD)
    assert prepared.not_enforced == ("/properties/email/pattern",)
    grammars().compile(json_schema(prepared.schema))
    text = '"r": {"a": 1, "b": 2.5}, "any": [1], "pick": null}'
    right = f'{{"email": "a@b.cd", "id": "x1", "n": 3, {text}'
    assert allows(ZOD, right)
    assert not allows(ZOD, right.replace(', "b": 2.5', ""))
    assert not allows(ZOD, right.replace('"pick"', '"never": 1, "pick"'))


LEAVES = st.sampled_from(
    [
        *(TEXT, COUNT, POINT, TAGS, {"type": "boolean"}, {"type": "null"}, True),
        *({"const": "a"}, {"enum": ["a", 1, None]}, {"type": "integer", "minimum": 3}),
        *({"type": "string", "pattern": "^[ab]+$"}, {"type": "string", "maxLength": 2}),
        *({"type": "string", "format": "odd"}, {"type": "string", "pattern": "^(?!a)"}),
        *({"type": "integer", "maximum": 5, "multipleOf": 2}, {"type": ["integer", "null"]}),
        *({"$ref": "#/$defs/p"}, {"not": {"type": "string"}}, {"type": "string", "format": "date"}),
    ]
)
KEYS = st.sampled_from(["a", "b", "c"])


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    schemas = st.lists(inner, min_size=1, max_size=3)
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(KEYS, inner, max_size=3),
            "required": st.lists(KEYS, max_size=2, unique=True),
            "additionalProperties": inner | st.booleans(),
            "patternProperties": st.dictionaries(
                st.sampled_from(["^(a|d)$", "^x"]), inner, max_size=2
            ),
            "propertyNames": st.sampled_from(
                [TEXT, {"enum": ["a", "d"]}, {"pattern": "^[abx]"}, {"maxLength": 1}]
            ),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(1, 3),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "maxItems": st.integers(0, 3)},
        optional={
            "items": inner,
            "prefixItems": schemas,
            "minItems": st.integers(0, 2),
            "uniqueItems": st.booleans(),
        },
    )
    combined = st.fixed_dictionaries(
        {}, optional={"anyOf": schemas, "oneOf": schemas, "allOf": schemas}
    )
    return objects | arrays | combined


ANY_SCHEMA = st.recursive(LEAVES, containers, max_leaves=6)


def random_output(schema: Any, rng: random.Random, max_tokens: int = 120) -> str | None:
    """A text that the grammar allows; None where the way was too long."""
    walk = Walk(json_schema(schema))
    eos, text = tokenizer().eos_ids, b""
    for _ in range(max_tokens):
        allowed = walk.allowed()
        if eos.intersection(allowed) and (len(allowed) == len(eos) or rng.random() < 0.5):
            return text.decode()
        ids = [i for i in allowed if i not in eos]
        closing = [i for i in ids if tokenizer().token_bytes[i] in (b'"', b"}", b"]")]
        token_id = rng.choice(closing if closing and rng.random() < 0.5 else ids)
        text += tokenizer().token_bytes[token_id]
        walk.commit(token_id)
    return None


def without(schema: Any, pointers: tuple[str, ...]) -> Any:
    """A schema without the keywords that are not enforced."""
    schema = copy.deepcopy(schema)
    for pointer in sorted(pointers, key=len, reverse=True):  # the inner ones first
        *path, last = [k.replace("~1", "/").replace("~0", "~") for k in pointer.split("/")[1:]]
        place = schema
        for key in path:
            place = place[int(key) if isinstance(place, list) else key]
        value = place.pop(last, None)
        if last == "oneOf":
            place["allOf"] = [*place.get("allOf", []), {"anyOf": value}]
    return schema


@given(ANY_SCHEMA, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_output_satisfies_the_original_schema(schema: Any, close: bool, rng: random.Random) -> None:
    root = {"$defs": {"p": POINT}, "allOf": [schema]}
    try:
        prepared = prepare_schema(root, closed=close)
        grammars().compile(json_schema(prepared.schema))
    except (SchemaError, RequestError):
        assume(False)
    text = random_output(prepared.schema, rng)
    assume(text is not None)
    assert text is not None
    validator = jsonschema.Draft202012Validator(without(root, prepared.not_enforced))
    validator.validate(json.loads(text))


@pytest.mark.parametrize("name", SCHEMAS)
def test_plain_schemas_lose_nothing(name: str) -> None:
    assert not_enforced(SCHEMAS[name]) == ()
    grammars().compile(json_schema(prepare_schema(SCHEMAS[name]).schema))
