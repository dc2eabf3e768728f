"""The arguments of a call, from the text that a model wrote."""

from __future__ import annotations

from typing import Any

import pydantic_core


def call_arguments(arguments: str) -> dict[str, Any] | None:
    """A call's arguments as templates want them, who write them out themselves.

    Returns:
        None: they are no JSON object, as where the token limit has cut them off.
    """
    return json_object(arguments or "{}")


def json_object(text: str) -> dict[str, Any] | None:
    """None: the text is no JSON, or no object in it."""
    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
