"""Request fields that constrain the form of the output."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from server.schemas.common import RequestModel

SomeText = Annotated[str, Field(min_length=1)]
Choices = TypeAliasType("Choices", Annotated[list[str], FailFast(), Field(min_length=1)])


class TextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]


class NamedSchema(RequestModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(
        None, description="the output always satisfies the schema, whether this is set or not"
    )


class JsonSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


_FORMATS = ("text", "json_object", "json_schema")


def _format_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in _FORMATS else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _format_kind,
        custom_error_type="response_format_type",
        custom_error_message=(
            "Input should be an object of type 'text', 'json_object' or 'json_schema'"
        ),
    ),
]


def _schema_kind(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<object>" if isinstance(value, dict) else None


JsonSchema = Annotated[
    Annotated[SomeText, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(
        _schema_kind,
        custom_error_type="schema_type",
        custom_error_message="Input should be a JSON schema, as an object or as text",
    ),
]


class StructuredOutputs(RequestModel):
    """vLLM's later form of the same: exactly one of the fields."""

    json_schema: JsonSchema | None = Field(None, alias="json")
    regex: SomeText | None = None
    choice: Choices | None = None
    grammar: SomeText | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = Field(
        None, description="JSON comes on one line, whether this is set or not"
    )


class StructuredFields(RequestModel):
    """OpenAI's `response_format` and vLLM's extras; at most one may constrain the output."""

    response_format: ResponseFormat | None = None
    guided_json: JsonSchema | None = None
    guided_regex: SomeText | None = None
    guided_choice: Choices | None = None
    guided_grammar: SomeText | None = Field(None, description="in Lark's or GBNF's syntax")
    structured_outputs: StructuredOutputs | None = None
