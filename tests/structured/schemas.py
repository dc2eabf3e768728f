"""JSON schemas whose every output is short enough for a test."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def closed(**properties: Schema) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WORD: Schema = {"type": "string", "maxLength": 8}
SMALL: Schema = {"type": "integer", "minimum": -20, "maximum": 300}

SCHEMAS: dict[str, Schema] = {
    "flat": closed(name=WORD, age=SMALL, active={"type": "boolean"}),
    "nested": closed(user=closed(id=SMALL, tags={"type": "array", "items": WORD, "maxItems": 3})),
    "long keys": closed(
        shipping_address=closed(street_and_number=WORD, postal_code=SMALL),
        customer_reference_number=SMALL,
    ),
    "enum": closed(colour={"enum": ["red", "green", "dark blue", 7, None]}),
    "const": closed(version={"const": "2024-05-17"}, kind={"const": 3}),
    "optional": {**closed(a=SMALL, b=WORD, c={"type": "null"}), "required": ["b"]},
    "any of": closed(value={"anyOf": [SMALL, WORD, closed(inner={"type": "boolean"})]}),
    "nullable": closed(note={"type": ["string", "null"], "maxLength": 5}),
    "array of objects": {
        "type": "array",
        "items": closed(x=SMALL, y=SMALL),
        "minItems": 2,
        "maxItems": 3,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [SMALL, WORD, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "references": {
        "$defs": {"point": closed(x=SMALL, y=SMALL)},
        **closed(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "recursive": {
        "$defs": {
            "tree": closed(
                value=SMALL,
                children={"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
            ),
            "leaf": closed(value=SMALL),
        },
        "$ref": "#/$defs/tree",
    },
    "pattern": closed(phone={"type": "string", "pattern": "^\\(\\d{3}\\) \\d{3}-\\d{4}$"}),
    "formats": closed(
        day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}
    ),
    "lengths": closed(code={"type": "string", "minLength": 3, "maxLength": 6}),
    "multiples": closed(steps={"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 500}),
    "scalar": {"enum": ["one", "two"]},
}
