from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.suites import DEFAULT_SUITE, Entry, SuiteError, read_suite


def write_lines(path: Path, *rows: Any) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_json_has_messages_by_category(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"code": ["a", "b"], "chat": ["c"]}))
    assert read_suite(path) == [
        Entry("code", messages=(user("a"),)),
        Entry("code", messages=(user("b"),)),
        Entry("chat", messages=(user("c"),)),
    ]


def test_jsonl_has_texts_chats_and_turns(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, user("u")]
    path = write_lines(
        tmp_path / "s.jsonl",
        {"category": "x", "prompt": "p", "options": {"stop": ["."]}},
        {"messages": chat},
        {"category": "mt", "turns": ["one", "two", "three"], "id": 7},
    )
    assert read_suite(path) == [
        Entry("x", prompt="p", options={"stop": ["."]}),
        Entry("all", messages=tuple(chat)),
        Entry("mt", messages=(user("one"),), later_turns=("two", "three")),
    ]


def test_humaneval_is_completed_up_to_the_next_definition(tmp_path: Path) -> None:
    row = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": ""}
    [entry] = read_suite(write_lines(tmp_path / "HumanEval.jsonl.gz", row))
    assert (entry.category, entry.prompt) == ("humaneval", "def f():\n")
    assert "\ndef" in entry.options["stop"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("s.json", "[1]", "must be an object of lists"),
        ("s.json", '{"a": "b"}', "category 'a': must be a list of texts"),
        ("s.json", "{}", "no entries"),
        ("s.jsonl", "", "no entries"),
        ("s.jsonl", "{", "Expecting property name"),
        ("s.jsonl", "[]", "line 1: must be an object"),
        ("s.jsonl", '\n{"category": "a"}', "line 2: must have 'prompt', 'messages' or 'turns'"),
        ("s.jsonl", '{"turns": [1]}', "line 1: must be a list of texts"),
        ("s.jsonl.gz", "no gzip", "Not a gzipped file"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, name: str, content: str, problem: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(SuiteError, match=problem) as caught:
        read_suite(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"none\.json: No such file"):
        read_suite(tmp_path / "none.json")


def test_our_own_suite_has_every_kind_of_work() -> None:
    entries = read_suite(DEFAULT_SUITE)
    assert {entry.category for entry in entries} == {
        "code", "edit", "chat", "summary", "completion",
    }  # fmt: skip
    assert any(entry.later_turns for entry in entries)
    assert any(entry.prompt is not None for entry in entries)
