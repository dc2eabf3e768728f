"""The header that tells a client what its schemas demand beyond what is enforced."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

HEADER = "X-Schema-Not-Enforced"
_MAX_LENGTH = 1000
_MORE = ", ..."


def header_value(keywords: Sequence[str]) -> str:
    """Fields and JSON pointers in them, such as ``guided_json#/not``, as many as fit."""
    told = ""
    for keyword in dict.fromkeys(keywords):
        longer = told + (", " if told else "") + quote(keyword, safe="/#$.~")
        if len(longer) + len(_MORE) > _MAX_LENGTH:
            return (told + _MORE).removeprefix(", ")
        told = longer
    return told
