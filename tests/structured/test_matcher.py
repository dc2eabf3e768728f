"""GrammarMatcher: drafts are tried and taken back; only committed tokens count."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from engine.request import GrammarSpec, Prelude
from engine.sampling.grammar_matcher import GrammarMatcher
from engine.sampling.grammar_tokens import GrammarVocabulary
from tests.structured.engines import (
    NUM_PADDING,
    Walk,
    allowed_in,
    grammars,
    json_schema,
    tokenizer,
)
from tests.structured.schemas import SCHEMAS

SPECS = {
    **{name: json_schema(schema) for name, schema in SCHEMAS.items()},
    "json object": GrammarSpec("json_object"),
    "regex": GrammarSpec("regex", r"(\w+|\d{2,4}) (yes|no)\.{0,3}"),
    "choice": GrammarSpec("choice", json.dumps(["the cat", "the catalogue", "🦊🚀"])),
    "lark": GrammarSpec("lark", 'start: e\ne: e "+" e | "(" e ")" | /[0-9]{1,3}/'),
    "prelude": GrammarSpec("regex", "[ab]{1,4}", Prelude(".", start=None)),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_draft_is_checked_as_if_its_tokens_were_committed_one_by_one(name: str) -> None:
    """Whatever was drafted, or asked about forced tokens, before: the masks are the same."""
    rng = random.Random(name)
    spec, eos_ids = SPECS[name], tokenizer().eos_ids
    drafted, stepped = Walk(spec), Walk(spec)
    for _ in range(12):
        path: list[int] = []
        masks: list[list[int]] = []
        probe = Walk(spec)
        for token_id in stepped.sequence.token_ids[1:]:
            probe.commit(token_id)
        while len(path) < 4 and not eos_ids.intersection(path):
            masks.append(probe.allowed())
            path.append(rng.choice(masks[-1]))
            probe.commit(path[-1])
        wrong = next(
            (i for i in range(len(tokenizer().token_bytes)) if i not in probe.allowed()), 0
        )
        if rng.random() < 0.5:
            drafted.matcher.forced()
        draft = [*path, wrong] if not eos_ids.intersection(path) else path
        check = drafted.check(draft)
        assert check.error is None
        assert check.num_rows >= len(path)
        for row, allowed in enumerate(masks):
            assert allowed_in(check.masks[row]) == allowed
        if eos_ids.intersection(path):
            return
        for walk in (drafted, stepped):
            walk.commit(path[0])


@pytest.mark.parametrize("name", SPECS)
def test_forced_tokens_are_the_only_ones_allowed(name: str) -> None:
    rng = random.Random(name)
    walk = Walk(SPECS[name])
    num_forced = 0
    for _ in range(60):
        forced = walk.matcher.forced()
        num_forced += len(forced)
        check = walk.check(forced)
        assert check.num_rows == len(forced) + 1
        for row, token_id in enumerate(forced):
            assert allowed_in(check.masks[row]) == [token_id]
        allowed = walk.allowed()
        token_id = rng.choice(allowed)
        if token_id in tokenizer().eos_ids:
            break
        walk.commit(token_id)
    assert num_forced > 0 or name not in SCHEMAS


def test_complete_output_allows_end_tokens_alone() -> None:
    walk = Walk(GrammarSpec("choice", '["the cat"]'))
    for token_id in tokenizer().encode_continuation("the cat") or ():
        assert not tokenizer().eos_ids.intersection(walk.allowed())
        walk.commit(token_id)
    assert set(walk.allowed()) == tokenizer().eos_ids


def test_no_mask_allows_control_tokens_or_padding() -> None:
    walk = Walk(GrammarSpec("regex", "(?s:.*)"))
    tokens = tokenizer()
    allowed = set(walk.allowed())
    num_tokens = len(tokens.token_bytes)
    assert max(allowed) < num_tokens
    assert walk.check([]).masks.size * 32 >= num_tokens + NUM_PADDING
    assert allowed & tokens.special_ids <= tokens.eos_ids
    assert len(allowed) > num_tokens / 2


def test_a_draft_that_is_not_allowed_leaves_no_trace() -> None:
    walk = Walk(json_schema(SCHEMAS["flat"]))
    before = walk.check([]).masks.copy()
    padding = len(tokenizer().token_bytes) + 3
    for draft in ([5, 6, 7], [padding, 5], [min(tokenizer().eos_ids)]):
        check = walk.check(draft)
        assert check.num_rows == 1
        np.testing.assert_array_equal(check.masks[:1], before)
    np.testing.assert_array_equal(walk.check([]).masks, before)


EASY_OR_HARD = r"x[a-z]+|y(\w|\p{L}){1,500}\d(?:[^x]{3,90}y){1,9}"


def limited() -> LLMatcher:
    """A matcher whose lexer gives up soon on the second of its two paths."""
    return LLMatcher(
        GrammarVocabulary(tokenizer(), grammars().vocab_size).index(),
        LLMatcher.grammar_from_regex(EASY_OR_HARD),
        log_level=0,
        limits=LLParserLimits(step_lexer_fuel=400, verbose_errors=False),
    )


def walk_from(start: LLMatcher) -> Walk:
    walk = Walk(GrammarSpec("regex", "x"))
    walk.matcher = GrammarMatcher(start, limited)
    return walk


HARD = "yabc1abcdef"


def ids_of(text: str) -> list[int]:
    return tokenizer().encode_continuation(text) or []


def test_limits_hit_on_a_drafts_path_end_the_draft_and_not_the_request() -> None:
    walk = walk_from(limited())
    check = walk.check(ids_of(HARD))
    assert 0 < check.num_rows <= len(ids_of(HARD))
    assert check.error is None
    for token_id in ids_of("xabc"):
        assert token_id in walk.allowed()
        walk.commit(token_id)
        assert walk.check(ids_of(HARD)).num_rows == 1


def test_limits_hit_by_one_request_do_not_hurt_another_of_the_same_grammar() -> None:
    """The library's copies share a lexer, and with it its failure."""
    start = limited()
    first, second, third = walk_from(start), walk_from(start), walk_from(start)
    for token_id in ids_of("xa"):
        second.commit(token_id)
    for token_id in ids_of(HARD):
        first.commit(token_id)
    stuck = first.check([])
    assert stuck.num_rows == 0
    assert stuck.error == (
        "The grammar allows no further token: lexer error: too many expressions constructed."
    )
    for walk, rest in ((second, "bc"), (third, "xabc")):
        for token_id in ids_of(rest):
            assert token_id in walk.allowed()
            walk.commit(token_id)
        assert tokenizer().eos_ids < set(walk.allowed())
