"""What keywords of JSON Schema hold, and how one is refused that holds something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")

Schema = Mapping[str, Any] | bool


class SchemaError(ValueError):
    """A schema can't be used; `pointer` says which part, as a JSON pointer."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(reason)
        self.pointer = pointer
        self.reason = reason

    @property
    def told(self) -> str:
        """Place and reason."""
        return f"at '{self.pointer}': {self.reason}" if self.pointer else self.reason


def step(pointer: str, *keys: str | int) -> str:
    """The JSON pointer of something inside what `pointer` points to."""
    escaped = (str(key).replace("~", "~0").replace("/", "~1") for key in keys)
    return "/".join([pointer, *escaped])


def as_schema(value: Any, pointer: str) -> Schema:
    if isinstance(value, bool | Mapping):
        return value
    raise SchemaError(pointer, "a schema must be an object or a boolean")


def as_list(value: Any, pointer: str) -> Sequence[Any]:
    if isinstance(value, list):
        return value
    raise SchemaError(pointer, "it must be a list")


def as_mapping(value: Any, pointer: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise SchemaError(pointer, "it must be an object")


def as_text(value: Any, pointer: str) -> str:
    if isinstance(value, str):
        return value
    raise SchemaError(pointer, "it must be a string")


def as_number(value: Any, pointer: str) -> int | float:
    if is_number(value):
        return value  # type: ignore[no-any-return]
    raise SchemaError(pointer, "it must be a number")


def as_count(value: Any, pointer: str) -> int:
    if is_number(value) and value >= 0 and int(value) == value:
        return int(value)
    raise SchemaError(pointer, "it must be a whole number that is not negative")


def as_types(value: Any, pointer: str) -> list[str]:
    """The names of a ``type``, which may be one or a list."""
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in TYPES:
            raise SchemaError(pointer, f"{name!r} is not one of {', '.join(TYPES)}")
    return names


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
