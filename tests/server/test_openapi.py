"""The OpenAPI document says about every endpoint what a reader needs."""

from __future__ import annotations

import pytest

TAGS = {"OpenAI", "Anthropic", "Tokens", "Operation"}


@pytest.fixture
def operations(app):
    return {
        (method.upper(), path): operation
        for path, item in app.openapi()["paths"].items()
        for method, operation in item.items()
    }


def test_every_operation_has_a_summary_of_its_own_and_one_tag(operations):
    assert ("POST", "/v1/chat/completions") in operations
    summaries = [operation["summary"] for operation in operations.values()]
    assert len(set(summaries)) == len(summaries)
    for place, operation in operations.items():
        from_the_name = operation["operationId"].partition("_v1_")[0].replace("_", " ").title()
        assert operation["summary"] != from_the_name, place
        assert operation["summary"][0].isupper(), place
        [tag] = operation["tags"]
        assert tag in TAGS, place


def test_health_describes_every_answer(operations):
    answers = operations["GET", "/health"]["responses"]
    assert {"200", "503", "4XX"} <= answers.keys()
    for answer in answers.values():
        assert "$ref" in answer["content"]["application/json"]["schema"]


def test_every_operation_that_reads_a_body_describes_body_answer_and_errors(operations):
    for (method, path), operation in operations.items():
        if method == "POST":
            body = operation["requestBody"]["content"]["application/json"]["schema"]
            assert "$ref" in body, path
            answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
            assert "$ref" in answer, path
            assert "4XX" in operation["responses"], path
