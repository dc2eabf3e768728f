"""Speculation fields, predictions and what is told about them."""

from __future__ import annotations

import pytest

from engine.request import DraftUsage, SpeculationParams
from engine.serving.async_engine import EngineState

KINDS = ["complete", "chat"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({}, SpeculationParams()),
        ({"speculation": None, "acceptance": None}, SpeculationParams()),
        ({"speculation": {}}, SpeculationParams()),
        ({"speculation": {"mode": "auto"}}, SpeculationParams()),
        ({"speculation": {"mode": "off"}}, SpeculationParams("off")),
        (
            {"speculation": {"mode": "ngram", "max_draft_tokens": 3}},
            SpeculationParams("ngram", 3),
        ),
        ({"speculation": {"max_draft_tokens": 0}}, SpeculationParams("auto", 0)),
        (
            {"speculation": {"acceptance": {"mode": "top_k", "k": 4}}},
            SpeculationParams(accept_top_k=4),
        ),
        ({"acceptance": {"mode": "top_k", "k": 2}}, SpeculationParams(accept_top_k=2)),
        ({"acceptance": {"mode": "exact"}}, SpeculationParams()),
        (
            {
                "acceptance": {"mode": "top_k", "k": 2},
                "speculation": {"acceptance": {"mode": "top_k", "k": 2}},
            },
            SpeculationParams(accept_top_k=2),
        ),
    ],
)
async def test_what_reaches_the_engine(client, engine, kind, fields, meant):
    assert (await getattr(client, kind)(**fields)).status_code == 200
    assert engine.submitted[0].speculation == meant


async def test_without_drafters_only_auto_and_off_are_left(client, engine):
    engine.drafters = ()
    error = (await client.chat(speculation={"mode": "ngram"})).json()["error"]
    assert "loaded: none" in error["message"]
    assert (await client.chat(speculation={"mode": "off"})).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("def f():", "def f():"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ("", None),
    ],
)
async def test_prediction_reaches_the_engine(client, engine, kind, content, text):
    prediction = {"type": "content", "content": content}
    assert (await getattr(client, kind)(prediction=prediction)).status_code == 200
    assert engine.submitted[0].prediction == text


@pytest.mark.parametrize("kind", KINDS)
async def test_usage_of_a_prediction(client, engine, kind):
    engine.drafts = (DraftUsage("ngram", 9, 9), DraftUsage("predicted", 8, 3))
    prediction = {"type": "content", "content": "12345"}
    body = (await getattr(client, kind)(prediction=prediction, n=2)).json()
    assert body["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 6,
        "rejected_prediction_tokens": 4,
    }
    assert "speculation" not in body["usage"]


async def test_more_accepted_than_predicted_is_no_negative_rejection(client, engine):
    engine.drafts = (DraftUsage("predicted", 8, 7),)
    body = (await client.chat(prediction={"type": "content", "content": "12345"})).json()
    assert body["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_stats(client, engine, kind, stream):
    engine.drafts = (DraftUsage("ngram", 9, 2), DraftUsage("predicted", 8, 3))
    fields = {"speculation": {"stats": True}, "n": 2}
    if stream:
        options = {"include_usage": True}
        call = getattr(client, f"{kind}_stream")
        usage = (await call(**fields, stream_options=options))[-1]["usage"]
    else:
        usage = (await getattr(client, kind)(**fields)).json()["usage"]
    assert usage["speculation"] == {
        "target_passes": 6,
        "drafted_tokens": 34,
        "accepted_tokens": 10,
        "by_drafter": {
            "ngram": {"drafted_tokens": 18, "accepted_tokens": 4},
            "predicted": {"drafted_tokens": 16, "accepted_tokens": 6},
        },
    }


@pytest.mark.parametrize("kind", KINDS)
async def test_usage_in_every_chunk(client, kind):
    call = getattr(client, f"{kind}_stream")
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = await call(stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert set(counts) == {1, 2, 3}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    only_continuous = await call(stream_options={"continuous_usage_stats": True})
    assert all("usage" not in event for event in only_continuous)


async def test_state(client, engine):
    response = await client.http.get("/v1/speculation")
    assert response.status_code == 200
    assert response.json()["drafters"] == ["predicted", "ngram"]
    engine.state = EngineState.LOADING
    assert (await client.http.get("/v1/speculation")).status_code == 503
