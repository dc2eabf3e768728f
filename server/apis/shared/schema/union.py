"""Unions of what is told apart by the type of its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Discriminator


def by_json_type(kinds: Mapping[type, str], *, error_type: str, message: str) -> Discriminator:
    """
    Args:
        kinds: the tag of a union's member by the type of the values it takes.
        message: what is said about a value of another type.
    """

    def kind(value: Any) -> str | None:
        return next((tag for known, tag in kinds.items() if isinstance(value, known)), None)

    return Discriminator(kind, custom_error_type=error_type, custom_error_message=message)
