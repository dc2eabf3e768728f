"""Reads suites of prompts from files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_SUITE = Path(__file__).parent / "suites" / "mixed.jsonl"

# Where an answer to a HumanEval prompt leaves the function it was asked to write.
_HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif")


class SuiteError(ValueError):
    """The suite can't be read; the message is one line that names the file and the entry."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One piece of work: a text to complete, or a conversation."""

    category: str
    prompt: str | None = None
    """A text for /v1/completions; None for a conversation."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation so far, for /v1/chat/completions."""
    later_turns: tuple[str, ...] = ()
    """What the user says after each answer: one more request each."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the request body."""


def read_suite(path: Path) -> list[Entry]:
    """Read a suite, by the form of its file.

    * ``.json``: ``{category: [user message, ...]}``
    * ``.jsonl``, also ``.jsonl.gz``: an object a line with ``prompt`` (a text to complete),
      ``messages`` (a chat as OpenAI has it) or ``turns`` (user messages, each sent with the answers
      before it), and optionally ``category`` and ``options`` (more fields of the request body);
      HumanEval's lines are known by their ``entry_point``.

    Raises:
        SuiteError: the file is missing, empty or of another form.
    """
    try:
        text = _read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        if path.suffix == ".json":
            entries = _from_categories(json.loads(text))
        else:
            entries = [
                _from_object(json.loads(line), number)
                for number, line in enumerate(text.splitlines(), start=1)
                if line.strip()
            ]
    except ValueError as error:
        raise SuiteError(f"{path}: {error}") from error
    if not entries:
        raise SuiteError(f"{path}: no entries")
    return entries


def _read_text(path: Path) -> str:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    return path.read_text(encoding="utf-8")


def _from_categories(values: Any) -> list[Entry]:
    if not isinstance(values, dict):
        raise ValueError("must be an object of lists of user messages")
    return [
        _conversation(category, _strings(turns, f"category {category!r}"), {})
        for category, messages in values.items()
        for turns in ([message] for message in _strings(messages, f"category {category!r}"))
    ]


def _from_object(values: Any, number: int) -> Entry:
    where = f"line {number}"
    if not isinstance(values, dict):
        raise ValueError(f"{where}: must be an object")
    if "entry_point" in values:
        return Entry("humaneval", prompt=values["prompt"], options={"stop": _HUMANEVAL_STOPS})
    category, options = values.get("category", "all"), values.get("options", {})
    if isinstance(prompt := values.get("prompt"), str):
        return Entry(category, prompt=prompt, options=options)
    if turns := values.get("turns"):
        return _conversation(category, _strings(turns, where), options)
    messages = values.get("messages")
    if isinstance(messages, list) and messages:
        return Entry(category, messages=tuple(messages), options=options)
    raise ValueError(f"{where}: must have 'prompt', 'messages' or 'turns'")


def _conversation(category: str, turns: Iterable[str], options: Mapping[str, Any]) -> Entry:
    first, *later = turns
    message = {"role": "user", "content": first}
    return Entry(category, messages=(message,), later_turns=tuple(later), options=options)


def _strings(values: Any, where: str) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{where}: must be a list of texts")
    return values
