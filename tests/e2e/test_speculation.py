"""Speculation over HTTP, on a tiny real model."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.served import Served

pytestmark = pytest.mark.slow

FIELDS: dict[str, Any] = {
    "model": "tiny",
    "prompt": "the cat eats green apples. a naïve robot",
    "max_tokens": 48,
    "temperature": 0.8,
    "seed": 5,
}


@pytest.mark.parametrize("mode", ["auto", "ngram", "universal", "predicted"])
def test_every_mode_gives_the_text_of_plain_decoding(client: openai.OpenAI, mode: str) -> None:
    def text(speculation: dict[str, Any]) -> str:
        body = {"speculation": speculation}
        return client.completions.create(**FIELDS, extra_body=body).choices[0].text

    assert (
        text({"mode": mode}) == text({"mode": mode, "max_draft_tokens": 2}) == text({"mode": "off"})
    )


def test_right_prediction_is_accepted_and_spares_passes(client: openai.OpenAI) -> None:
    def answer(prediction: str) -> openai.types.Completion:
        body = {
            "speculation": {"mode": "predicted", "stats": True},
            "prediction": {"type": "content", "content": prediction},
        }
        return client.completions.create(**FIELDS, extra_body=body)

    plain = client.completions.create(**FIELDS).choices[0].text
    right, wrong = answer(plain), answer("%" * 20)
    assert right.choices[0].text == wrong.choices[0].text == plain
    details: Any = right.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 24
    assert right.usage.speculation["target_passes"] < 24
    assert (
        right.usage.speculation["by_drafter"]["predicted"]["accepted_tokens"]
        == details.accepted_prediction_tokens
    )
    details = wrong.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 0
    assert details.rejected_prediction_tokens > 0
    assert wrong.usage.speculation["target_passes"] == 48


def test_drafters_are_named_when_a_mode_is_unknown(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="predicted, ngram, universal"):
        client.completions.create(**FIELDS, extra_body={"speculation": {"mode": "model"}})


def test_state_can_be_read_while_requests_run(server: Served, client: openai.OpenAI) -> None:
    stream = client.completions.create(**FIELDS | {"max_tokens": 200}, stream=True)
    for _, _chunk in zip(range(20), stream, strict=False):
        state = httpx.get(f"{server.url}/v1/speculation", timeout=60).json()
        assert {"predicted", "ngram", "universal"} <= set(state["drafters"])
        assert state["policy"] == "auto"
    stream.close()
