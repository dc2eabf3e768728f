from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.draft.reencoding import split_whole_characters
from engine.request import FinishReason, SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stops import StopMatcher
from engine.text.stream import TextStream
from tests.engine.helpers import byte_tokenizer

BYTES = [bytes([b]) for b in range(256)]


@given(st.text())
def test_detokenizer_emits_only_whole_characters(text: str) -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    parts = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(parts) == text
    assert detokenizer.finish() == ""
    assert "\ufffd" not in "".join(parts) or "\ufffd" in text


def test_unfinished_character_appears_at_the_end_only() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    assert [detokenizer.push(b) for b in "é".encode()[:1] + "😀".encode()[:3]] == [
        "",
        "\ufffd",
        "",
        "",
    ]
    assert detokenizer.finish() == "\ufffd"


def test_hidden_and_unknown_tokens_leave_no_text() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, frozenset({65}))
    assert [detokenizer.push(i) for i in (65, 66, 999)] == ["", "B", ""]


@given(
    st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=5))
)
def test_stop_matcher_cuts_at_the_first_stop_and_leaks_nothing(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for character in text:
        emitted += matcher.push(character)
        assert not any(stop in emitted for stop in stops)
    emitted += matcher.finish()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (emitted, matcher.matched) == (text, None)
        return
    first_end = min(ends)
    candidates = [stop for stop in stops if text[:first_end].endswith(stop)]
    assert matcher.matched == max(candidates, key=len)
    assert emitted == text[: first_end - len(matcher.matched)]


def test_text_that_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.push(t) for t in ("Hi", "\nUs", "ers", "\n", "User:", "more")] == [
        "Hi", "", "\nUsers", "", "", "",
    ]  # fmt: skip
    assert matcher.matched == "\nUser:"


def test_stop_may_stay_in_the_output() -> None:
    matcher = StopMatcher(["##"], include_match=True)
    assert matcher.push("a#") + matcher.push("#b") == "a##"


def stream(**params: Any) -> TextStream:
    defaults: dict[str, Any] = {"max_tokens": 100, "seed": 0}
    return TextStream(SamplingParams(**(defaults | params)), byte_tokenizer(90, eos_ids=[1]))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("params", "tokens", "kept", "reason", "stop"),
    [
        ({"max_tokens": 3}, [40, 41, 42, 43, 44], 3, FinishReason.LENGTH, None),
        ({"max_tokens": 0}, [40, 41], 0, FinishReason.LENGTH, None),
        ({}, [40, 1, 42, 43], 2, FinishReason.STOP, None),
        ({"ignore_eos": True, "max_tokens": 3}, [40, 1, 42, 43], 3, FinishReason.LENGTH, None),
        ({"stop_token_ids": frozenset({42})}, [40, 41, 42, 43], 3, FinishReason.STOP, 42),
        ({"stop": ("IJ",)}, [39, 40, 41, 42], 3, FinishReason.STOP, "IJ"),
        ({"stop": ("ZZZ",)}, [39, 40, 1], 3, FinishReason.STOP, None),
    ],
)
def test_the_end_does_not_depend_on_how_many_tokens_a_step_commits(
    size: int,
    params: dict[str, Any],
    tokens: list[int],
    kept: int,
    reason: FinishReason,
    stop: str | int | None,
) -> None:
    texts = stream(**params)
    counted, text = 0, ""
    for start in range(0, len(tokens), size):
        step = texts.push(tuple(tokens[start : start + size]))
        counted += step.num_tokens
        text += step.text
        if step.finish_reason:
            break
    assert (counted, step.finish_reason, step.stop_reason) == (kept, reason, stop)
    visible = "".join(chr(33 + t) for t in tokens[:kept] if t != 1)
    assert text == (
        visible.removesuffix(stop)
        if isinstance(stop, str)
        else visible[:-1]
        if isinstance(stop, int)
        else visible
    )


@given(st.text(min_size=1), st.integers(0, 3))
def test_split_whole_characters(text: str, cut: int) -> None:
    data = text.encode()
    data = data[: max(0, len(data) - cut)]
    whole, rest = split_whole_characters(data)
    assert whole + rest == data
    whole.decode()
    assert len(rest) < 4
