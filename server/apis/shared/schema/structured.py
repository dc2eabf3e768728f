"""Request fields that constrain the form of the output."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from server.apis.shared.schema.base import RequestModel
from server.apis.shared.schema.union import by_json_type

SomeText = Annotated[str, Field(min_length=1)]
Choices = TypeAliasType("Choices", Annotated[list[str], FailFast(), Field(min_length=1)])


class ConstraintModel(RequestModel):
    """All that is in such an object constrains the output, so that nothing in it is ignored."""

    model_config = ConfigDict(extra="forbid")


JsonSchema = Annotated[
    Annotated[SomeText, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    by_json_type(
        {str: "<text>", dict: "<object>"},
        error_type="schema_type",
        message="Input should be a JSON schema, as an object or as text",
    ),
]


class TextFormat(ConstraintModel):
    type: Literal["text"]


class JsonObjectFormat(ConstraintModel):
    type: Literal["json_object", "json"]
    json_schema: JsonSchema | None = Field(
        None, alias="schema", description="as llama.cpp and Together have it"
    )
    value: JsonSchema | None = Field(None, description="the same, as TGI has it")


class NamedSchema(ConstraintModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(
        None,
        description="objects hold no properties that the schema doesn't list; "
        "the output satisfies the schema, whether this is set or not",
    )


class JsonSchemaFormat(ConstraintModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema | None = None
    bare_schema: JsonSchema | None = Field(
        None, alias="schema", description="without a name, as llama.cpp has it"
    )


class RegexFormat(ConstraintModel):
    type: Literal["regex"]
    pattern: SomeText | None = Field(None, description="as Together has it")
    regex: SomeText | None = Field(None, description="as TensorRT-LLM has it")
    value: SomeText | None = Field(None, description="as TGI has it")


class GrammarFormat(ConstraintModel):
    type: Literal["grammar", "ebnf"]
    grammar: SomeText | None = Field(None, description="in GBNF, as Fireworks has it")
    ebnf: SomeText | None = Field(None, description="in GBNF, as TensorRT-LLM has it")


_FORMATS = {
    "text": "<text>",
    "json_object": "<json_object>",
    "json": "<json_object>",
    "json_schema": "<json_schema>",
    "regex": "<regex>",
    "grammar": "<grammar>",
    "ebnf": "<grammar>",
}


def _format_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _FORMATS.get(kind) if isinstance(kind, str) else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[RegexFormat, Tag("<regex>")]
    | Annotated[GrammarFormat, Tag("<grammar>")],
    Discriminator(
        _format_kind,
        custom_error_type="response_format_type",
        custom_error_message=(
            "Input should be an object of type 'text', 'json_object', 'json_schema', 'regex' or "
            "'grammar'"
        ),
    ),
]


class TypedGrammar(ConstraintModel):
    """TGI's form of `grammar`."""

    type: Literal["json", "regex"]
    value: JsonSchema


Grammar = Annotated[
    Annotated[SomeText, Tag("<text>")] | Annotated[TypedGrammar, Tag("<typed>")],
    by_json_type(
        {str: "<text>", dict: "<typed>"},
        error_type="grammar_type",
        message="Input should be a grammar as text, or an object of type and value",
    ),
]


PlainFormat = Annotated[
    Annotated[Literal["json"], Tag("<name>")] | Annotated[dict[str, Any], Tag("<schema>")],
    by_json_type(
        {str: "<name>", dict: "<schema>"},
        error_type="format_type",
        message="Input should be 'json' or a JSON schema",
    ),
]


class StructuredOutputs(ConstraintModel):
    """vLLM's later form of the same: exactly one of the fields."""

    json_schema: JsonSchema | None = Field(None, alias="json")
    regex: SomeText | None = None
    choice: Choices | None = None
    grammar: SomeText | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = Field(
        None, description="JSON comes on one line, whether this is set or not"
    )
    disable_additional_properties: bool | None = Field(
        None, description="objects hold no properties that the schema doesn't list"
    )


class StructuredFields(RequestModel):
    """OpenAI's `response_format` and others' fields; at most one may constrain the output."""

    response_format: ResponseFormat | None = None
    json_schema: JsonSchema | None = Field(None, description="llama.cpp's and SGLang's")
    grammar: Grammar | None = Field(None, description="llama.cpp's, in GBNF; TGI's")
    format: PlainFormat | None = Field(None, description="Ollama's: `json` or a JSON schema")
    regex: SomeText | None = Field(None, description="SGLang's")
    ebnf: SomeText | None = Field(None, description="SGLang's, in GBNF")
    guided_json: JsonSchema | None = None
    guided_regex: SomeText | None = None
    guided_choice: Choices | None = None
    guided_grammar: SomeText | None = Field(None, description="in Lark's or GBNF's syntax")
    structured_outputs: StructuredOutputs | None = None
