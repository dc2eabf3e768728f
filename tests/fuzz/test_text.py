"""Text to tokens and back, whole and in pieces; and through server-sent events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer
from loadtest.client import Client
from server.apis.shared.http.sse import DONE, encode_event
from server.apis.shared.schema.base import ResponseModel
from tests.fuzz.examples import fuzzed
from tests.structured.engines import tokenizer

STYLES = st.sampled_from(["byte_level", "sentencepiece"])
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(
        alphabet=st.sampled_from(
            "a <|>_▁Ġ\n\t\r\0é🦊🇩🇪👨‍👩‍👧\u0301\u200d\ufeff\ufffd\u2028im_startend"
        ),
        max_size=60,
    ),
    st.lists(
        st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<0x0A>", " ", "cat", "\n"])
    ).map("".join),
)


@fuzzed(quick=400, long=50_000, style=STYLES, text=TEXTS)
def test_text_survives_tokens(style: str, text: str) -> None:
    tokens = tokenizer(style)
    ids = tokens.encode_plain(text)
    assert not tokens.special_ids & set(ids), "text never becomes a control token"
    whole = tokens.bytes_of(ids).decode()
    if style == "sentencepiece" and text:
        assert whole == f" {text}".replace("▁", " "), "which stands for a space in its pieces"
    else:
        assert whole == text
    continued = tokens.encode_continuation(text)
    if continued is not None:
        assert tokens.bytes_of(continued) == text.encode()
    detokenizer = IncrementalDetokenizer(tokens.token_bytes)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join([*pieces, detokenizer.finish()]) == whole


@fuzzed(
    quick=400,
    long=50_000,
    style=STYLES,
    ids=st.lists(st.integers(0, 520), max_size=40),
)
def test_any_tokens_have_the_text_of_their_bytes(style: str, ids: list[int]) -> None:
    tokens = tokenizer(style)
    known = [i for i in ids if i < len(tokens.token_bytes) and i not in tokens.special_ids]
    detokenizer = IncrementalDetokenizer(tokens.token_bytes, tokens.special_ids)
    text = "".join([*(detokenizer.push(i) for i in ids), detokenizer.finish()])
    assert text == tokens.bytes_of(known).decode(errors="replace")


class Payload(ResponseModel):
    value: Any


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@fuzzed(quick=400, long=50_000, value=JSON)
def test_events_survive_any_reader_of_lines(value: Any) -> None:
    stream = encode_event(Payload(value=value)) + DONE
    text = stream.decode()
    lines = [line for line in text.splitlines() if line]
    assert lines == [line for line in text.split("\n") if line], "no other line ends"
    assert len(lines) == 2
    read = json.loads(lines[0].removeprefix("data: "))["value"]
    assert read == json.loads(json.dumps(value))


EVENTS = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [
                b"data: [DONE]\n\n",
                b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n',
                b'data: {"choices": [{"delta": null}]}\n\n',
                b'data: {"choices": null, "usage": 5}\n\n',
                b'data: {"error": "x"}\n\n',
                b'data: {"usage": {"completion_tokens": 2}, "choices": []}\n\n',
                b"data: 5\n\n",
                b"data: []\n\n",
                b"data\n\n",
                b": ping\n\n",
            ]
        ),
    ),
    max_size=6,
).map(b"".join)


@fuzzed(quick=150, long=20_000, content=EVENTS)
def test_load_generator_reads_anything(content: bytes) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=content)

    async def send() -> None:
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(answer), base_url="http://test"
        ) as http:
            record = await Client(http, {}).send("all", "/v1/completions", {})
        complete = b"data: [DONE]" in content and b"completion_tokens" in content
        assert record.error is not None or complete

    asyncio.run(send())
