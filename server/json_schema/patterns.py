"""Regular expressions in schemas."""

from __future__ import annotations

import re

_ESCAPE_OR_CLASS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_NOT_REGULAR = re.compile(r"\\[1-9bBkc]|\(\?<?[=!]", re.DOTALL)
_LITERAL = r"[\w \-/:@]+"
_LISTED = re.compile(rf"\^(?:({_LITERAL})|\((?:\?:)?({_LITERAL}(?:\|{_LITERAL})*)\))\$")


def can_be_enforced(pattern: str) -> bool:
    """Whether a pattern does without look-around, references back and the like.

    Those describe no regular language, or one that the grammar compiler doesn't read.
    """
    place = 0
    for found in _ESCAPE_OR_CLASS.finditer(pattern):
        if _NOT_REGULAR.search(pattern[place : found.start()]):
            return False
        if not found[0].startswith("[") and _NOT_REGULAR.match(found[0]):
            return False
        place = found.end()
    return not _NOT_REGULAR.search(pattern[place:])


def matches_listed(pattern: str) -> list[str] | None:
    """All texts that a pattern matches where it plainly lists them, as in ``^(a|b)$``."""
    found = _LISTED.fullmatch(pattern)
    if found is None:
        return None
    return list(dict.fromkeys((found[1] or found[2]).split("|")))
