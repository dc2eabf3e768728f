"""Finding a tag in text that arrives bit by bit."""

from __future__ import annotations


def split_at_tag(text: str, tag: str) -> tuple[str, str | None]:
    """What is in front of a tag and what is behind it; (text, None) when it does not occur."""
    before, found, behind = text.partition(tag)
    return before, behind if found else None


def partial_tag_length(text: str, tag: str) -> int:
    """Length of the longest end of `text` with which the tag may begin."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[len(text) - length :]):
            return length
    return 0
