"""The sampling fields that every generating endpoint takes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    FailFast,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from server.apis.shared.schema.base import RequestModel
from server.apis.shared.schema.speculation import AcceptanceOptions, Prediction, SpeculationOptions
from server.apis.shared.schema.structured import StructuredFields
from server.apis.shared.schema.union import by_json_type

MAX_LOGIT_BIAS = 100.0

StopText = Annotated[str, Field(min_length=1)]
StopTexts = TypeAliasType("StopTexts", Annotated[list[StopText], FailFast()])
TokenId = Annotated[int, Field(ge=0)]
TokenIds = TypeAliasType("TokenIds", Annotated[list[TokenId], FailFast()])


Stop = Annotated[
    Annotated[StopText, Tag("<text>")] | Annotated[StopTexts, Tag("<texts>")],
    by_json_type(
        {str: "<text>", list: "<texts>"},
        error_type="stop_type",
        message="Input should be a string or a list of strings",
    ),
]


def _parse_logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias_type", "Input should map token ids to numbers")
    parsed: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise PydanticCustomError("logit_bias_key", "{key} is no token id", {"key": repr(key)})
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise PydanticCustomError(
                "logit_bias_value",
                "the bias of token {key} should be a number from -100 to 100",
                {"key": key},
            )
        parsed[int(key)] = float(bias)
    return parsed


LogitBias = Annotated[
    dict[int, float] | None,
    PlainValidator(_parse_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                {"type": "null"},
            ]
        }
    ),
]


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(StructuredFields):
    """OpenAI's sampling fields and the usual extensions; null means the default."""

    model: str
    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, allow_inf_nan=False)
    logit_bias: LogitBias = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prediction: Prediction | None = None
    speculation: SpeculationOptions | None = None
    acceptance: AcceptanceOptions | None = None
    cache_salt: str | None = Field(
        None,
        min_length=1,
        description="cached prompt prefixes are shared only among requests with the same one",
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="requests with a lower one are served first"
    )
    return_token_ids: bool | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
