from __future__ import annotations

import pytest

from engine.request import RequestError
from engine.text.infill import InfillTokens
from engine.text.tokenizer import TextTokenizer
from tests.tiny_models import make_tokenizer

QWEN = {"<|fim_prefix|>": 5, "<|fim_middle|>": 6, "<|fim_suffix|>": 7, "<|endoftext|>": 0}


def test_tokens_are_found_by_their_family_names() -> None:
    assert InfillTokens.find(QWEN) == InfillTokens(prefix=5, suffix=7, middle=6)
    assert InfillTokens.find({"<fim_prefix>": 1, "<fim_suffix>": 2}) is None


def test_prompt() -> None:
    assert InfillTokens(5, 7, 6).prompt([1, 2], [3]) == [5, 1, 2, 7, 3, 6]


def test_tokenizer_with_and_without() -> None:
    fast = make_tokenizer("byte_level", 400)
    with pytest.raises(RequestError) as caught:
        TextTokenizer(fast).encode_infill("a", "b")
    assert caught.value.param == "suffix"
    fast.add_special_tokens({"extra_special_tokens": list(QWEN)[:3]})
    tokenizer = TextTokenizer(fast)
    ids = tokenizer.encode_infill("the <|fim_suffix|> cat", "map")
    marks = [tokenizer.encode(name)[0] for name in list(QWEN)[:3]]
    prefix, middle, suffix = marks
    assert (
        tokenizer.bytes_of(ids)
        == b"<|fim_prefix|>the <|fim_suffix|> cat<|fim_suffix|>map<|fim_middle|>"
    )
    assert [i for i in ids if i in marks] == [prefix, suffix, middle]
