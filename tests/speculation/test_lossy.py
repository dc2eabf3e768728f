"""Lossy acceptance (`accept_top_k`): what else may be accepted, and what never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.draft.drafter import Draft, DraftRequest, FreeDrafter
from engine.request import GrammarSpec, SamplingParams, SpeculationParams
from engine.sampling.restrict import likeliest
from tests.engine.helpers import byte_tokenizer, make_core, make_request, run_all, tokens_of
from tests.engine.mock_model import VOCAB_SIZE, MockRunner
from tests.structured.engines import make_engine, structured, tokenizer

END = 60
ANY = VOCAB_SIZE
"""Any token is likely enough, so only what the target may not sample is refused."""


class StubbornDrafter(FreeDrafter):
    """Proposes one token, again and again."""

    name = "stubborn"

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def propose_one(self, request: DraftRequest) -> Draft:
        return Draft((self._token_id,) * request.max_tokens)


def generate(drafted: int, accept: int = ANY, **params: Any) -> tuple[list[int], int]:
    """Tokens of a request whose draft is stubborn, and how many were accepted lossily."""
    core = make_core(
        MockRunner(128),
        drafters=[StubbornDrafter(drafted)],
        tokenizer=byte_tokenizer(VOCAB_SIZE, eos_ids=[END]),
    )
    defaults = {"max_tokens": 40, "ignore_eos": drafted != END}
    request = make_request([1, 2], "r", **(defaults | params))
    request = replace(request, speculation=SpeculationParams(accept_top_k=accept))
    return tokens_of(run_all(core, [request])["r"]), core.metrics.lossy_accepted_tokens


both_temperatures = pytest.mark.parametrize("temperature", [0.0, 1.0])


@both_temperatures
def test_whatever_is_likely_is_accepted(temperature: float) -> None:
    """Which shows that what is refused below is refused for its reason."""
    tokens, num_lossy = generate(7, temperature=temperature)
    assert tokens.count(7) > 25
    assert num_lossy > 25


@both_temperatures
def test_a_banned_token_is_not_accepted(temperature: float) -> None:
    tokens, num_lossy = generate(7, temperature=temperature, logit_bias={7: -torch.inf})
    assert 7 not in tokens
    assert num_lossy == 0
    tokens, _ = generate(7, accept=30, temperature=temperature, logit_bias={7: -100.0})
    assert 7 not in tokens, "the bias decides how likely it is"


@both_temperatures
def test_a_token_that_the_bias_makes_likely_is_accepted(temperature: float) -> None:
    others = dict.fromkeys(range(8, VOCAB_SIZE - 4), 20.0)
    ranked_high = dict.fromkeys((7, 8), 30.0)
    tokens, num_lossy = generate(
        7, accept=2, temperature=temperature, logit_bias=others | ranked_high
    )
    assert set(tokens) == {7, 8}
    assert num_lossy > 5


@both_temperatures
def test_no_end_before_the_minimum(temperature: float) -> None:
    tokens, _ = generate(END, temperature=temperature, min_tokens=20)
    assert END not in tokens[:20]
    assert tokens[20] == END, "from there on it is accepted"


@both_temperatures
@pytest.mark.parametrize(
    "truncation",
    [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}],
    ids=lambda value: next(iter(value)),
)
def test_nothing_that_truncation_leaves_out(
    temperature: float, truncation: dict[str, float]
) -> None:
    """The mock model's tokens are seldom among its likeliest three."""
    tokens, num_lossy = generate(7, temperature=temperature, **truncation)
    free, num_free = generate(7, temperature=temperature)
    assert num_free > 25
    assert num_lossy < 10
    assert tokens.count(7) < free.count(7) / 2


def test_penalties_count() -> None:
    tokens, _ = generate(7, accept=8, frequency_penalty=2.0, temperature=0.0)
    free, _ = generate(7, accept=8, temperature=0.0)
    assert tokens.count(7) < free.count(7)
    assert tokens.count(7) <= 4


def test_a_grammar_counts() -> None:
    core, vocabulary = make_engine(), tokenizer()
    (allowed,) = vocabulary.encode_plain("a")
    for drafted, is_allowed in ((allowed, True), (vocabulary.encode_plain("z")[0], False)):
        core = make_core(
            core.target,
            drafters=[StubbornDrafter(drafted)],
            tokenizer=vocabulary,
            grammars=core.grammars,
        )
        request = structured(GrammarSpec("regex", "[abc]{30}"), f"r{drafted}", temperature=1.0)
        request = replace(request, speculation=SpeculationParams(accept_top_k=500))
        tokens = tokens_of(run_all(core, [request])[request.request_id])
        assert (tokens.count(drafted) > 10) == is_allowed
        assert (core.metrics.lossy_accepted_tokens > 0) == is_allowed


def test_the_likeliest_are_those_that_can_be_sampled() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, -torch.inf, 0.0], [0.0, 9.0, -torch.inf, 8.5, 8.0]])
    plain = SamplingParams(9, seed=1)
    assert likeliest(logits, plain, 2) == [[0, 1], [1, 3]]
    assert likeliest(logits, plain, 9) == [[0, 1, 2, 4], [1, 3, 4, 0]]
    assert likeliest(logits, replace(plain, top_k=1), 3) == [[0], [1]]
    assert likeliest(logits, replace(plain, min_p=0.3), 9) == [[0, 1], [1, 3, 4]]
    hot = replace(plain, min_p=0.3, temperature=4.0)
    assert likeliest(logits, hot, 9) == [[0, 1, 2], [1, 3, 4]]
    greedy = replace(plain, min_p=0.3, temperature=0.0)
    assert likeliest(logits, greedy, 9) == [[0, 1], [1, 3, 4]]
