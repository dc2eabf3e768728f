"""Grammars of clients in which only one byte can follow, again and again: no thread hangs."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import GrammarSpec, Prelude, RequestError
from tests.structured.engines import Walk, grammars, tokenizer

ENDLESS = [
    "start: a\na: b a\nb: /x+/",
    "start: /x+/ /x+/",
    'start: "d" | "x" a\na: b a\nb: /x+/',
    'root ::= "x" root',
    "start: A A\nA: /x/+",
    'start: /x+/ /x+/\n%llguidance {"no_forcing": false}',
    'start: /x+/ /x+/\n%llguidance {"no_forcing": false} #',
    'start: %lark {\nstart: /x+/ /x+/\n%llguidance {"no_forcing": false}\n}',
]


def walk_on(spec: GrammarSpec, begin: str) -> None:
    """Commit a few tokens; what is forced behind each must be allowed there."""
    tokens = tokenizer("byte_level")
    walk = Walk(spec, "byte_level")
    for token_id in tokens.encode_plain(begin):
        walk.commit(token_id)
        walk.matcher.forced()
    for _ in range(5):
        allowed = [i for i in walk.allowed() if i not in tokens.eos_ids]
        if not allowed:
            break
        walk.commit(allowed[0])
        forced = walk.matcher.forced()
        assert walk.num_allowed(forced) == len(forced)


@pytest.mark.parametrize("text", ENDLESS)
@pytest.mark.parametrize("begin", ["", "x", "xx"])
@pytest.mark.parametrize("prelude", [None, Prelude("</t>", start=None)])
def test_no_thread_hangs(text: str, begin: str, prelude: Prelude | None) -> None:
    spec = GrammarSpec("lark", text, prelude)
    ended = threading.Event()

    def work() -> None:
        try:
            walk_on(spec, begin if prelude is None else f"y</t>{begin}")
        except RequestError:
            pass
        finally:
            ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert ended.wait(20)


PARTS = st.sampled_from(["a", "b", "c", '"x"', "/y+/", "(a)", "[b]", "c*", "a?", "(a | b)", "b{2}"])
BODIES = st.lists(st.lists(PARTS, max_size=3).map(" ".join), min_size=1, max_size=3).map(" | ".join)


@given(a=BODIES, b=BODIES, c=BODIES)
def test_small_grammars(a: str, b: str, c: str) -> None:
    spec = GrammarSpec("lark", f"start: a\na: {a}\nb: {b}\nc: {c}")
    try:
        grammars().compile(spec)
    except RequestError:
        return
    walk_on(spec, "")


def test_rules_of_the_server_still_force() -> None:
    """Only clients' grammars lose what forced tokens save."""
    text = 'start: "abcdefgh" | "abcdefxy"'
    forced = {
        kind: grammars().matcher(grammars().compile(GrammarSpec(kind, text))).forced()
        for kind in ("rules", "lark")
    }
    assert forced["rules"]
    assert forced["lark"] == []
