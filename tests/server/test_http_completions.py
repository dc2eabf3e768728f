"""POST /v1/completions against a scripted engine."""

from __future__ import annotations

import math

import pytest

from engine.request import (
    SEED_MASK,
    FinishReason,
    RequestOutput,
    SamplingDefaults,
    TextPrompt,
    TokenLogprob,
    Usage,
)
from server.apis.completions.best_of import BestOf
from server.apis.completions.schema import CompletionChoice
from tests.server.scripted_engine import BOS, EOS, NO_DETAILS, Step, words


async def test_whole_response(client, engine):
    response = await client.complete()
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny/model"
    assert body["system_fingerprint"].startswith("fp_")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello world!",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": NO_DETAILS,
    }
    assert engine.submitted[0].request_id == f"{body['id']}-0"
    assert engine.submitted[0].source == TextPrompt("Say hello")
    assert engine.num_requests == 0
    assert engine.aborted == []


async def test_defaults_are_openais(client, engine):
    await client.complete()
    params = engine.submitted[0].params
    assert (params.max_tokens, params.temperature, params.top_p) == (16, 1.0, 1.0)
    assert (params.logprobs, params.prompt_logprobs, params.stop) == (None, None, ())


async def test_default_max_tokens_fits_what_is_left_of_the_context(client, engine):
    assert (await client.complete(prompt="x" * 120)).status_code == 200
    assert engine.submitted[0].params.max_tokens == 8


async def test_nulls_mean_defaults(client, engine):
    names = (
        "n max_tokens temperature top_p top_k min_p presence_penalty frequency_penalty "
        "repetition_penalty logit_bias seed stop stop_token_ids min_tokens ignore_eos echo best_of "
        "include_stop_str_in_output skip_special_tokens logprobs stream stream_options user suffix"
    )
    response = await client.complete(**dict.fromkeys(names.split()))
    assert response.status_code == 200
    assert engine.submitted[0].params.max_tokens == 16


async def test_every_sampling_field_reaches_the_engine(client, engine):
    response = await client.complete(
        max_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        presence_penalty=-1.5,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={"5": -100, "257": 1.5},
        seed=42,
        stop=["a", "bc"],
        stop_token_ids=[3, 4],
        min_tokens=2,
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=2,
        user="someone",
    )
    assert response.status_code == 200
    params = engine.submitted[0].params
    assert params.max_tokens == 7
    assert params.temperature == 0.5
    assert params.top_p == 0.25
    assert params.top_k == 40
    assert params.min_p == 0.125
    assert params.presence_penalty == -1.5
    assert params.frequency_penalty == 1.5
    assert params.repetition_penalty == 1.25
    assert params.logit_bias == {5: -100.0, 257: 1.5}
    assert params.seed == 42
    assert params.stop == ("a", "bc")
    assert params.stop_token_ids == {3, 4}
    assert params.min_tokens == 2
    assert params.ignore_eos
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens
    assert (params.logprobs, params.prompt_logprobs) == (2, None)


@pytest.mark.parametrize(
    ("field", "given", "attribute", "meant"),
    [
        ("stop", "END", "stop", ("END",)),
        ("top_k", -1, "top_k", 0),
        ("temperature", 0, "temperature", 0.0),
        ("temperature", 1e-30, "temperature", 0.0),
        ("temperature", 2, "temperature", 2.0),
        ("seed", -1, "seed", SEED_MASK),
        ("seed", -(2**63), "seed", 0),
        ("seed", 2**63 - 1, "seed", SEED_MASK),
    ],
)
async def test_forms_of_a_value(client, engine, field, given, attribute, meant):
    assert (await client.complete(**{field: given})).status_code == 200
    assert getattr(engine.submitted[0].params, attribute) == meant


async def test_without_a_seed_every_request_and_prompt_draws_its_own(client, engine):
    await client.complete(prompt=["a", "a"])
    await client.complete(prompt="a")
    seeds = {request.params.seed for request in engine.submitted}
    assert len(seeds) == 3
    assert all(0 <= seed <= SEED_MASK for seed in seeds)


@pytest.mark.parametrize(
    ("prompt", "ids", "texts"),
    [
        ("ab", [(97, 98)], ["ab"]),
        (["a", "bc"], [(97,), (98, 99)], ["a", "bc"]),
        ([97, 98], [(97, 98)], ["ab"]),
        ([[97], [98, 99]], [(97,), (98, 99)], ["a", "bc"]),
        ([[BOS, 97]], [(BOS, 97)], ["a"]),
    ],
)
async def test_forms_of_prompts(client, engine, prompt, ids, texts):
    body = (await client.complete(prompt=prompt)).json()
    assert [request.prompt_token_ids for request in engine.submitted] == ids
    assert [request.source for request in engine.submitted] == [TextPrompt(t) for t in texts]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(ids)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert body["usage"]["completion_tokens"] == 3 * len(ids)


async def test_choices_of_several_prompts(client, engine):
    engine.script = lambda request: words(f"{request.request_id[-1]}:", "x")
    body = (await client.complete(prompt=["aa", "bbb"], n=2, seed=5)).json()
    assert [choice["text"] for choice in body["choices"]] == ["0:x", "1:x", "2:x", "3:x"]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    ids = [request.request_id for request in engine.submitted]
    assert ids == [f"{body['id']}-{i}" for i in range(4)]
    first, second, third, fourth = (request.params.seed for request in engine.submitted)
    assert first == third == 5
    assert second == fourth == engine.submitted[0].params.for_choice(1).seed


async def test_best_of_equal_to_n_changes_nothing(client):
    body = (await client.complete(n=2, best_of=2)).json()
    assert len(body["choices"]) == 2


@pytest.mark.parametrize("n", [1, 3])
async def test_stream_says_the_same_as_the_whole_response(client, engine, n):
    engine.script = lambda request: [
        Step("é", (b"\xc3", b"\xa9")),
        Step("", (b"<en",)),
        Step(" und\nso", (b" und", b"\nso")),
        Step("", (b"d>",), FinishReason.STOP, "<end>"),
    ]
    fields = {"n": n, "logprobs": 2, "prompt": ["a", "b"], "stop": "<end>"}
    whole = (await client.complete(**fields)).json()
    events = await client.complete_stream(**fields)
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)
    for choice in whole["choices"]:
        chunks = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"] == "é und\nso"
        for name, values in choice["logprobs"].items():
            streamed = [value for chunk in chunks for value in chunk["logprobs"][name]]
            assert streamed == values
        assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "stop"
        assert chunks[-1]["stop_reason"] == choice["stop_reason"] == "<end>"


async def test_chunks_of_a_stream_interleave_by_index(client, engine):
    engine.pace = 0.005
    events = await client.complete_stream(n=3)
    order = [event["choices"][0]["index"] for event in events]
    assert sorted(order) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert order != sorted(order)


async def test_held_back_text_sends_no_empty_chunk(client, engine):
    engine.script = lambda request: [Step("", (b"a",)), *words("ab", "c")]
    events = await client.complete_stream()
    assert [event["choices"][0]["text"] for event in events] == ["ab", "c"]


async def test_usage_chunk(client):
    *events, last = await client.complete_stream(stream_options={"include_usage": True}, n=2)
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 6,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": NO_DETAILS,
    }


async def test_echo(client):
    for prompt in (["ab", "cd"], [[97, 98], [99, 100]]):
        body = (await client.complete(prompt=prompt, echo=True, n=2)).json()
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == ["abHello world!"] * 2 + ["cdHello world!"] * 2
    events = await client.complete_stream(prompt="ab", echo=True)
    assert [event["choices"][0]["text"] for event in events] == ["abHello", " world", "!"]


async def test_logprobs(client):
    choice = (await client.complete(logprobs=3)).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["Hello", " world", "!"],
        "token_logprobs": [-0.25, -0.5, -0.75],
        "top_logprobs": [
            {"top": -0.125, "Hello": -0.25, "bytes:\\xe2\\x80": -9999.0},
            {"top": -0.25, " world": -0.5, "bytes:\\xe2\\x80": -9999.0},
            {"top": -0.375, "!": -0.75, "bytes:\\xe2\\x80": -9999.0},
        ],
        "text_offset": [0, 5, 11],
    }


async def test_chosen_token_is_listed_beside_the_likeliest(client):
    logprobs = (await client.complete(logprobs=1)).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == {"top": -0.125, "Hello": -0.25}
    logprobs = (await client.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == {"Hello": -0.25}


async def test_tokens_that_are_no_utf8_are_escaped_and_offsets_count_characters(client, engine):
    engine.script = lambda request: [
        Step("", (b" \xf0\x9f",)),
        Step(" 😀x", (b"\x98\x80", b"x"), FinishReason.STOP),
    ]
    logprobs = (await client.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes: \\xf0\\x9f", "bytes:\\x98\\x80", "x"]
    assert logprobs["text_offset"] == [0, 2, 2]


async def test_minus_infinity_stays_valid_json(client, engine):
    response = await client.complete(logprobs=3)
    assert "Infinity" not in response.text
    assert math.isfinite(response.json()["choices"][0]["logprobs"]["top_logprobs"][0]["top"])


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_a_prompt(client, engine, stream):
    fields = {"prompt": "añb", "echo": True, "max_tokens": 0, "logprobs": 1}
    if stream:
        (event,) = await client.complete_stream(**fields)
        choice = event["choices"][0]
    else:
        body = (await client.complete(**fields)).json()
        choice = body["choices"][0]
        assert body["usage"]["completion_tokens"] == 0
    assert engine.submitted[0].params.prompt_logprobs == 1
    assert choice["text"] == "añb"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xb1", "b"],
        "token_logprobs": [None, -0.25, -0.5, -0.75],
        "top_logprobs": [
            None,
            {"top": -0.125, "bytes:\\xc3": -0.25},
            {"top": -0.25, "bytes:\\xb1": -0.5},
            {"top": -0.375, "b": -0.75},
        ],
        "text_offset": [0, 1, 2, 2],
    }


async def test_echo_with_logprobs_and_output(client):
    choice = (await client.complete(prompt="ab", echo=True, logprobs=0)).json()["choices"][0]
    assert choice["text"] == "abHello world!"
    assert choice["logprobs"]["tokens"] == ["a", "b", "Hello", " world", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.75]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 7, 13]


@pytest.mark.parametrize(
    ("text", "token_ids", "tokens", "offsets"),
    [
        ("ab", [BOS, 97, 98], ["<bos>", "a", "b"], [0, 0, 1]),
        ("ab", [32, 97, 98], [" ", "a", "b"], [0, 0, 1]),
        ("ab", [BOS, 32, 97, 98], ["<bos>", " ", "a", "b"], [0, 0, 0, 1]),
        (" a", [32, 97], [" ", "a"], [0, 1]),
        ("<bos>a<eos>b", [BOS, 97, EOS, 98], ["<bos>", "a", "<eos>", "b"], [0, 5, 6, 11]),
        ("a<bos>", [BOS, 97, BOS], ["<bos>", "a", "<bos>"], [0, 0, 1]),
    ],
)
async def test_offsets_of_what_the_tokenizer_adds(client, engine, text, token_ids, tokens, offsets):
    engine.tokenizer.encode = lambda text, **options: token_ids
    body = (await client.complete(prompt=text, echo=True, logprobs=0)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"][: len(tokens)] == tokens
    end = len(text)
    assert logprobs["text_offset"] == [*offsets, end, end + 5, end + 11]


@pytest.mark.parametrize(("shown", "offset"), [(True, 6), (False, 1)])
async def test_offsets_of_special_tokens_in_the_output(client, engine, shown, offset):
    engine.tokenizer.special_ids = frozenset({2})
    fields = {"prompt": "a", "echo": True, "logprobs": 0, "skip_special_tokens": not shown}
    engine.script = lambda request: [Step("x", (b"<eos>", b"x"), FinishReason.STOP)]
    logprobs = (await client.complete(**fields)).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, offset]


async def test_finish_by_length(client):
    body = (await client.complete(max_tokens=2)).json()
    assert body["choices"][0]["text"] == "Hello world"
    assert body["choices"][0]["finish_reason"] == "length"


async def test_stop_token_is_named(client, engine):
    engine.script = lambda request: [Step("a", (b"a", b""), FinishReason.STOP, 7)]
    body = (await client.complete(stop_token_ids=[7])).json()
    assert body["choices"][0]["stop_reason"] == 7


@pytest.mark.parametrize(("n", "kept"), [(1, ["2", "5"]), (2, ["2", "111", "5", "444"])])
async def test_best_of_keeps_the_likeliest_by_mean_logprob(client, engine, n, kept):
    lengths = {0: 4, 1: 3, 2: 1, 3: 4, 4: 3, 5: 1}

    def script(request):
        number = int(request.request_id.rpartition("-")[2])
        return words(*[str(number)] * lengths[number])  # each further token is less likely

    engine.script = script
    body = (await client.complete(prompt=["a", "b"], n=n, best_of=3)).json()
    assert [choice["text"] for choice in body["choices"]] == kept
    assert [choice["index"] for choice in body["choices"]] == list(range(len(kept)))
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 16
    assert {request.params.logprobs for request in engine.submitted} == {0}


def test_best_of_goes_by_the_mean_and_not_by_the_sum():
    best = BestOf(num_candidates=2, num_choices=1)
    for index, logprobs in enumerate([[-2.0], [-1.0, -1.5]]):
        entries = tuple(TokenLogprob(0, b"", value, ()) for value in logprobs)
        best.note(index, RequestOutput("", "", (), Usage(1, 1, 0), logprobs=entries))
    choices = [
        CompletionChoice(index=i, text=str(i), logprobs=None, finish_reason="stop")
        for i in range(2)
    ]
    assert [(c.index, c.text) for c in best.choices(choices)] == [(0, "1")]


async def test_best_of_with_logprobs_and_nothing_generated(client, engine):
    body = (await client.complete(best_of=2, logprobs=1)).json()
    assert body["choices"][0]["logprobs"]["tokens"] == ["Hello", " world", "!"]
    body = (await client.complete(best_of=2, max_tokens=0, echo=True)).json()
    assert body["choices"][0]["text"] == "Say hello"


async def test_infill(client, engine):
    engine.infills = True
    body = (await client.complete(prompt=["a", "b"], suffix="z")).json()
    assert [choice["text"] for choice in body["choices"]] == ["Hello world!"] * 2
    assert [r.prompt_token_ids for r in engine.submitted] == [
        (BOS, 97, EOS, 122),
        (BOS, 98, EOS, 122),
    ]
    assert engine.submitted[0].source == TextPrompt("a")
    assert (await client.complete(suffix="")).status_code == 200
    assert engine.submitted[-1].prompt_token_ids == tuple(b"Say hello")


@pytest.mark.parametrize("n", [1, 2])
async def test_token_ids(client, engine, n):
    engine.script = lambda request: [Step("", (b"a",)), *words("ab", "c")]
    fields = {"prompt": ["xy", "z"], "n": n, "return_token_ids": True}
    whole = (await client.complete(**fields)).json()["choices"]
    assert [choice["token_ids"] for choice in whole] == [[0, 1, 2]] * 2 * n
    assert [choice["prompt_token_ids"] for choice in whole] == [[120, 121]] * n + [[122]] * n
    chunks = [event["choices"][0] for event in await client.complete_stream(**fields)]
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert [i for chunk in own for i in chunk["token_ids"]] == [0, 1, 2]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert all("prompt_token_ids" not in chunk for chunk in own[1:])
    assert "token_ids" not in (await client.complete()).json()["choices"][0]


async def test_the_models_advice_fills_in_for_the_client(client, engine):
    engine.sampling_defaults = SamplingDefaults(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05
    )
    await client.complete()
    params = engine.submitted[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.8, 20)
    assert (params.min_p, params.repetition_penalty) == (0.1, 1.05)
    await client.complete(temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1)
    params = engine.submitted[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)
