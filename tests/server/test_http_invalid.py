"""Invalid input: each case is a 400 in OpenAI's shape that names its field."""

from __future__ import annotations

from typing import Any

import pytest

INF, NAN = float("inf"), float("nan")

SHARED = [
    # (fields, param, part of the message)
    ({"model": 3}, "model", "string"),
    ({"model": None}, "model", "string"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": -1}, "n", "greater than or equal to 1"),
    ({"n": 4}, "n", "limit is 3"),
    ({"n": 10**30}, "n", "limit is 3"),
    ({"n": 1.5}, "n", "integer"),
    ({"n": "2"}, "n", "integer"),
    ({"n": True}, "n", "integer"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"temperature": "1"}, "temperature", "number"),
    ({"temperature": True}, "temperature", "number"),
    ({"temperature": [1]}, "temperature", "number"),
    ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
    ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
    ({"top_p": {}}, "top_p", "number"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"top_k": 2**31}, "top_k", "less than or equal to"),
    ({"top_k": 1.5}, "top_k", "integer"),
    ({"min_p": -0.1}, "min_p", "greater than or equal to 0"),
    ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
    ({"presence_penalty": -2.1}, "presence_penalty", "greater than or equal to -2"),
    ({"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "greater than or equal to -2"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "less than or equal to 2"),
    ({"frequency_penalty": "x"}, "frequency_penalty", "number"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"repetition_penalty": -1}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"repetition_penalty": 101}, "repetition_penalty", "less than or equal to 100"),
    ({"logit_bias": [1]}, "logit_bias", "map token ids to numbers"),
    ({"logit_bias": "x"}, "logit_bias", "map token ids to numbers"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1' is no token id"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "is no token id"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias", "is no token id"),
    ({"logit_bias": {"": 1}}, "logit_bias", "is no token id"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"1": -101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"1": "5"}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"1": True}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"1": None}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"9999": 1}}, "logit_bias", "9999"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"seed": "1"}, "seed", "integer"),
    ({"seed": 2**63}, "seed", "less than or equal to"),
    ({"seed": -(2**63) - 1}, "seed", "greater than or equal to"),
    ({"stop": ""}, "stop", "at least 1 character"),
    ({"stop": 5}, "stop", "a string or a list of strings"),
    ({"stop": {"a": 1}}, "stop", "a string or a list of strings"),
    ({"stop": ["a", 5]}, "stop.1", "string"),
    ({"stop": ["a", ""]}, "stop.1", "at least 1 character"),
    ({"stop": ["a", None]}, "stop.1", "string"),
    ({"stop": ["a", "b", "c"]}, "stop", "limit is 2"),
    ({"stop_token_ids": 5}, "stop_token_ids", "list"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids.0", "integer"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids.1", "greater than or equal to 0"),
    ({"stop_token_ids": [260]}, "stop_token_ids", "ids end at 259"),
    ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "maximum of 5"),
    ({"min_tokens": 10**30}, "min_tokens", "maximum of"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to"),
    ({"max_tokens": 0}, "max_tokens", ""),
    ({"max_tokens": "5"}, "max_tokens", "integer"),
    ({"max_tokens": 5.5}, "max_tokens", "integer"),
    ({"max_tokens": 125}, "max_tokens", "maximum context length is 128"),
    ({"max_tokens": 10**30}, "max_tokens", "maximum context length is 128"),
    ({"ignore_eos": "yes"}, "ignore_eos", "boolean"),
    ({"ignore_eos": 1}, "ignore_eos", "boolean"),
    ({"include_stop_str_in_output": 0}, "include_stop_str_in_output", "boolean"),
    ({"skip_special_tokens": "false"}, "skip_special_tokens", "boolean"),
    ({"stream": "true"}, "stream", "boolean"),
    ({"stream": 1}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "'stream' is true"),
    ({"stream": True, "stream_options": 5}, "stream_options", "dictionary"),
    ({"stream": True, "stream_options": []}, "stream_options", "dictionary"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "boolean",
    ),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": "yes"}},
        "stream_options.continuous_usage_stats",
        "boolean",
    ),
    ({"user": 5}, "user", "string"),
    ({"return_token_ids": 1}, "return_token_ids", "boolean"),
    ({"response_format": "json"}, "response_format", "object of type"),
    ({"response_format": {"type": "xml"}}, "response_format", "object of type"),
    ({"response_format": {}}, "response_format", "object of type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "Missing",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
        "response_format.json_schema.name",
        "pattern",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
        "response_format.json_schema.schema",
        "dictionary",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"const": "broken"}},
            }
        },
        "response_format.json_schema.schema",
        "it is broken",
    ),
    ({"guided_json": 5}, "guided_json", "JSON schema"),
    ({"guided_json": ""}, "guided_json", "at least 1 character"),
    ({"guided_json": [{}]}, "guided_json", "JSON schema"),
    ({"guided_json": {"const": "broken"}}, "guided_json", "it is broken"),
    ({"guided_json": {"type": "strange"}}, "guided_json", "at '/type': 'strange' is not one of"),
    ({"guided_json": {"a": "x" * 3000}}, "guided_json", "the limit is 2048"),
    ({"guided_regex": ""}, "guided_regex", "at least 1 character"),
    ({"guided_regex": 1}, "guided_regex", "string"),
    ({"guided_regex": "broken"}, "guided_regex", "it is broken"),
    ({"guided_choice": []}, "guided_choice", "at least 1 item"),
    ({"guided_choice": "a"}, "guided_choice", "list"),
    ({"guided_choice": ["a", 1]}, "guided_choice.1", "string"),
    ({"guided_grammar": ["a"]}, "guided_grammar", "string"),
    ({"guided_grammar": "broken"}, "guided_grammar", "it is broken"),
    ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern", "not supported"),
    ({"structured_outputs": "a"}, "structured_outputs", "dictionary"),
    ({"structured_outputs": {}}, "structured_outputs", "must hold one of"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must hold one of"),
    ({"structured_outputs": {"json": 1}}, "structured_outputs.json", "JSON schema"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "string"),
    ({"structured_outputs": {"regex": "broken"}}, "structured_outputs.regex", "it is broken"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1 item"),
    (
        {"structured_outputs": {"regex": "a", "grammar": "b"}},
        "structured_outputs.grammar",
        "'structured_outputs.regex' and 'structured_outputs.grammar'",
    ),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "not supported",
    ),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "guided_regex",
        "'response_format' and 'guided_regex' both",
    ),
    (
        {"guided_choice": ["a"], "guided_json": {}},
        "guided_choice",
        "'guided_json' and 'guided_choice' both",
    ),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "structured output"),
    ({"speculation": "off"}, "speculation", "dictionary"),
    ({"speculation": {"mode": 5}}, "speculation.mode", "string"),
    ({"speculation": {"mode": "universal"}}, "speculation.mode", "loaded: predicted, ngram"),
    ({"speculation": {"mode": "x" * 2000}}, "speculation.mode", "loaded: predicted, ngram"),
    ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens", "equal to 0"),
    ({"speculation": {"max_draft_tokens": 33}}, "speculation.max_draft_tokens", "equal to 32"),
    ({"speculation": {"max_draft_tokens": 1.5}}, "speculation.max_draft_tokens", "integer"),
    ({"speculation": {"stats": 1}}, "speculation.stats", "boolean"),
    ({"speculation": {"acceptance": "top_k"}}, "speculation.acceptance", "dictionary"),
    ({"speculation": {"acceptance": {}}}, "speculation.acceptance.mode", "Missing"),
    (
        {"speculation": {"acceptance": {"mode": "top_k"}}},
        "speculation.acceptance.k",
        "Missing",
    ),
    ({"acceptance": {"mode": "lossy"}}, "acceptance.mode", "'exact' or 'top_k'"),
    ({"acceptance": {"mode": "top_k"}}, "acceptance.k", "Missing"),
    ({"acceptance": {"mode": "exact", "k": 2}}, "acceptance.k", "only for mode 'top_k'"),
    ({"acceptance": {"mode": "top_k", "k": 0}}, "acceptance.k", "equal to 1"),
    ({"acceptance": {"mode": "top_k", "k": 101}}, "acceptance.k", "equal to 100"),
    (
        {
            "acceptance": {"mode": "top_k", "k": 2},
            "speculation": {"acceptance": {"mode": "exact"}},
        },
        "acceptance",
        "differ",
    ),
    ({"prediction": "text"}, "prediction", "dictionary"),
    ({"prediction": {"type": "content"}}, "prediction.content", "Missing"),
    ({"prediction": {"content": "a"}}, "prediction.type", "Missing"),
    ({"prediction": {"type": "text", "content": "a"}}, "prediction.type", "'content'"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content", "text parts"),
    ({"prediction": {"type": "content", "content": []}}, "prediction.content", "at least 1"),
    (
        {"prediction": {"type": "content", "content": "x" * 2049}},
        "prediction",
        "limit for this model is 2048",
    ),
]

COMPLETION = [
    ({"prompt": None}, "prompt", "a string, a list of strings"),
    ({"prompt": 5}, "prompt", "a string, a list of strings"),
    ({"prompt": {"a": 1}}, "prompt", "a string, a list of strings"),
    ({"prompt": True}, "prompt", "a string, a list of strings"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [""]}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [[1], []]}, "prompt", "empty"),
    ({"prompt": ["a", 5]}, "prompt.1", "string"),
    ({"prompt": [5, "a"]}, "prompt.1", "integer"),
    ({"prompt": [5, 1.5]}, "prompt.1", "integer"),
    ({"prompt": [True]}, "prompt.0", "integer"),
    ({"prompt": [None]}, "prompt.0", "integer"),
    ({"prompt": [[5], "a"]}, "prompt.1", "list"),
    ({"prompt": [[5, "a"]]}, "prompt.0.1", "integer"),
    ({"prompt": [[[5]]]}, "prompt.0.0", "integer"),
    ({"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
    ({"prompt": [258]}, "prompt", "between 0 and 257"),
    ({"prompt": [10**30]}, "prompt", "between 0 and 257"),
    ({"prompt": ["a"] * 5}, "prompt", "limit is 4"),
    ({"prompt": "x" * 128}, "prompt", "has 128"),
    ({"prompt": [1] * 200}, "prompt", "has 200"),
    ({"prompt": "x" * 120, "max_tokens": 9}, "max_tokens", "need 129"),
    ({"logprobs": -1}, "logprobs", "greater than or equal to 0"),
    ({"logprobs": 4}, "logprobs", "limit is 3"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"logprobs": 1.5}, "logprobs", "integer"),
    ({"echo": "yes"}, "echo", "boolean"),
    ({"best_of": 4}, "best_of", "between 'n' (1) and 3"),
    ({"best_of": 10**30}, "best_of", "between 'n' (1) and 3"),
    ({"best_of": 2, "stream": True}, "best_of", "must equal 'n'"),
    ({"best_of": "2"}, "best_of", "integer"),
    ({"best_of": 0}, "best_of", "greater than or equal to 1"),
    ({"best_of": 1, "n": 2}, "best_of", "between 'n' (2) and 3"),
    ({"suffix": "end"}, "suffix", "no infill tokens"),
    ({"suffix": "end", "prompt": [1, 2]}, "suffix", "as text"),
    ({"suffix": "end", "echo": True}, "echo", "'suffix'"),
    ({"suffix": 5}, "suffix", "string"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "not supported"),
]

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_CALLS: list[tuple[dict[str, Any], str, str]] = [
    ({"id": 5}, "id", "string"),
    ({"type": "custom"}, "type", "'function'"),
    ({"function": "f"}, "function", "dictionary"),
    ({"function": {"name": "f"}}, "function.arguments", "Missing"),
    ({"function": {"name": "f", "arguments": {}}}, "function.arguments", "string"),
    ({"function": {"name": "a b", "arguments": ""}}, "function.name", "pattern"),
]


def tool(**parts):
    return {"type": "function", "function": {"name": "f", **parts}}


CHAT = [
    ({"messages": None}, "messages", "list"),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": {}}, "messages", "list"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": ["Hi"]}, "messages.0", "dictionary"),
    ({"messages": [HI, None]}, "messages.1", "dictionary"),
    ({"messages": [{"content": "Hi"}]}, "messages.0.role", "Missing"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "Missing"),
    ({"messages": [{**HI, "role": "wizard"}]}, "messages.0.role", "'user'"),
    ({"messages": [{**HI, "role": "tool"}]}, "messages.0.tool_call_id", "Missing"),
    ({"messages": [{**HI, "tool_call_id": "x"}]}, "messages.0.tool_call_id", "a tool message"),
    ({"messages": [{**HI, "role": "tool", "tool_call_id": 5}]}, "messages.0.tool_call_id", "str"),
    ({"messages": [{**HI, "role": 5}]}, "messages.0.role", "'user'"),
    ({"messages": [HI, {**HI, "content": None}]}, "messages.1.content", "may be null only"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content", "null only"),
    ({"messages": [{**HI, "content": 5}]}, "messages.0.content", "text parts"),
    ({"messages": [{**HI, "content": {}}]}, "messages.0.content", "text parts"),
    ({"messages": [{**HI, "content": []}]}, "messages.0.content", "at least 1 item"),
    ({"messages": [{**HI, "content": ["Hi"]}]}, "messages.0.content.0", "dictionary"),
    ({"messages": [{**HI, "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "Missing"),
    (
        {"messages": [{**HI, "content": [{"type": "text", "text": 5}]}]},
        "messages.0.content.0.text",
        "string",
    ),
    (
        {"messages": [{**HI, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0",
        "takes no images, only text",
    ),
    (
        {"messages": [HI, {**HI, "tool_calls": [{"id": "x"}]}]},
        "messages.1.tool_calls.0.function",
        "Missing",
    ),
    ({"messages": [HI, {"role": "assistant", "content": "x"}]}, "messages", "user last"),
    ({"messages": [{**HI, "content": "x" * 200}]}, "messages", "has 206"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
    ({"max_completion_tokens": 125}, "max_completion_tokens", "maximum context length is 128"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
    ({"logprobs": 2}, "logprobs", "boolean"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "greater than or equal to 0"),
    ({"logprobs": True, "top_logprobs": 4}, "top_logprobs", "limit is 3"),
    ({"top_logprobs": 2}, "top_logprobs", "'logprobs' is true"),
    ({"messages": [{**HI, "tool_calls": [CALL]}]}, "messages.0.tool_calls", "an assistant"),
    *(
        (
            {"messages": [HI, {"role": "assistant", "tool_calls": [{**CALL, **part}]}, HI]},
            f"messages.1.tool_calls.0.{param}",
            message,
        )
        for part, param, message in BAD_CALLS
    ),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "Missing"),
    ({"tools": "x"}, "tools", "list"),
    ({"tools": {}}, "tools", "list"),
    ({"tools": [5]}, "tools.0", "dictionary"),
    ({"tools": [None]}, "tools.0", "dictionary"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type", "'function'"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "Missing"),
    ({"tools": [tool(name="")]}, "tools.0.function.name", "pattern"),
    ({"tools": [tool(name="x" * 65)]}, "tools.0.function.name", "pattern"),
    ({"tools": [tool(name="a b")]}, "tools.0.function.name", "pattern"),
    ({"tools": [tool(name="f\n")]}, "tools.0.function.name", "pattern"),
    ({"tools": [tool(description=5)]}, "tools.0.function.description", "string"),
    ({"tools": [tool(parameters=5)]}, "tools.0.function.parameters", "dictionary"),
    ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters", "dictionary"),
    ({"tools": [tool(strict="yes")]}, "tools.0.function.strict", "boolean"),
    ({"tools": [tool(), tool()]}, "tools.1", "called 'f'"),
    ({"tool_choice": "required"}, "tool_choice", "only allowed with 'tools'"),
    (
        {"tool_choice": "required", "tools": [tool()], "guided_regex": "a"},
        "tool_choice",
        "both constrain",
    ),
    ({"tool_choice": "any", "tools": [tool()]}, "tool_choice", "'required'"),
    ({"tool_choice": 5, "tools": [tool()]}, "tool_choice", "name a function"),
    ({"tool_choice": {}, "tools": [tool()]}, "tool_choice.type", "Missing"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "Missing"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]},
        "tool_choice",
        "'g'",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"messages": [{**HI, "reasoning_content": 5}]}, "messages.0.reasoning_content", "string"),
    ({"messages": [{**HI, "name": 5}]}, "messages.0.name", "string"),
    ({"add_generation_prompt": "yes"}, "add_generation_prompt", "boolean"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "add_generation_prompt",
        "exclude each other",
    ),
    ({"functions": [{}]}, "functions.0.name", "Missing"),
    ({"functions": [{"name": "a b"}]}, "functions.0.name", "pattern"),
    ({"functions": [{"name": "f"}] * 2}, "functions.1", "Two tools are called 'f'"),
    ({"functions": [{"name": "f"}], "tools": [tool()]}, "functions", "only one of the two"),
    ({"functions": [{"name": "f"}], "tool_choice": "auto"}, "functions", "only one of the two"),
    ({"function_call": {"name": "f"}}, "function_call", "none of 'functions'"),
    ({"function_call": "required"}, "function_call", "'none' or 'auto'"),
    ({"function_call": 5}, "function_call", "'none', 'auto' or name a function"),
    ({"messages": [HI, {"role": "function", "content": "x"}]}, "messages.1.name", "Missing"),
    (
        {"messages": [{**HI, "function_call": {"name": "f", "arguments": ""}}]},
        "messages.0.function_call",
        "an assistant message",
    ),
    (
        {"tools": [tool()], "tool_choice": {"type": "allowed_tools"}},
        "tool_choice.allowed_tools",
        "Missing",
    ),
    (
        {
            "tools": [tool()],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "g"}}],
                },
            },
        },
        "tool_choice",
        "names 'g', which is none of 'tools'",
    ),
    ({"verbosity": "loud"}, "verbosity", "'low', 'medium' or 'high'"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"audio": {"voice": "x"}}, "audio", "not supported"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "enable_thinking"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "enable_thinking"),
    (
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template_kwargs.chat_template",
        "enable_thinking",
    ),
    (
        {"chat_template_kwargs": {"enable_thinking": "<think>"}},
        "chat_template_kwargs.enable_thinking",
        "boolean",
    ),
    (
        {"chat_template_kwargs": {"reasoning_effort": 5}},
        "chat_template_kwargs.reasoning_effort",
        "string",
    ),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "dictionary"),
    ({"continue_final_message": True}, "continue_final_message", "assistant message last"),
    ({"continue_final_message": 1}, "continue_final_message", "boolean"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "'none', 'minimal'"),
    ({"web_search_options": {}}, "web_search_options", "not supported"),
]


def assert_refused(response, param, message, status=400):
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert message in error["message"]


@pytest.mark.parametrize(("fields", "param", "message"), SHARED + COMPLETION)
async def test_completions(client, engine, fields, param, message):
    assert_refused(await client.complete(**fields), param, message)
    assert engine.num_requests == 0
    assert (await client.complete()).status_code == 200


@pytest.mark.parametrize(("fields", "param", "message"), SHARED + CHAT)
async def test_chat(client, engine, fields, param, message):
    assert_refused(await client.chat(**fields), param, message)
    assert engine.num_requests == 0
    assert (await client.chat()).status_code == 200


@pytest.mark.parametrize("fields", [{"max_tokens": 125}, {"prompt": "x" * 128}])
async def test_context_errors_have_openais_code(client, fields):
    error = (await client.complete(**fields)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "128 tokens" in error["message"]


async def test_one_refused_prompt_of_several_leaves_nothing_running(client, engine):
    assert_refused(await client.complete(prompt=["a", "x" * 128], n=2), "prompt", "has 128")
    assert engine.num_requests == 0
    assert engine.submitted == [], "all are prepared before the first is queued"


@pytest.mark.parametrize(
    ("path", "param"),
    [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")],
)
async def test_missing_fields(client, path, param):
    assert_refused(await client.http.post(path, json={}), "model", "Missing")
    response = await client.http.post(path, json={"model": "tiny/model"})
    assert_refused(response, param, "Missing")


NUMBERS = [
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "n", "max_tokens", "logprobs",
]  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
async def test_numbers_that_are_none(client, name, literal):
    response = await client.http.post(
        "/v1/completions",
        content=f'{{"model": "tiny/model", "prompt": "a", "{name}": {literal}}}',
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == (None if literal[-1] in "Ny" else name)


@pytest.mark.parametrize("literal", ["NaN", "1e999"])
async def test_bias_that_is_no_number(client, literal):
    response = await client.http.post(
        "/v1/completions",
        content=f'{{"model": "tiny/model", "prompt": "a", "logit_bias": {{"1": {literal}}}}}',
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b'{"model": "tiny/model",}', "not valid JSON"),
        (b"{'model': 1}", "not valid JSON"),
        (b'{"model": "tiny/model"} x', "not valid JSON"),
        (b'{"model": \xef\xbb\xbf"tiny/model"}', "not valid JSON"),
        (b'{"model": "\xff\xfe"}', "not valid JSON"),
        (b'{"model": "tiny/model", "prompt": "\xed\xa0\x80"}', "not valid JSON"),
        (b'{"model": "tiny/model", "prompt": "\\ud800"}', "not valid JSON"),
        (b'{"model": "a\nb"}', "not valid JSON"),
        (b"[" * 2000, "not valid JSON"),
        (b'{"a":' * 600 + b"1" + b"}" * 600, "not valid JSON"),
        (b'{"model": "tiny/model", "prompt": ' + b"[" * 500 + b"]" * 500 + b"}", "not valid JSON"),
        (b"9" * 4000, ""),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"5", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bodies_that_are_no_json_object(client, path, content, message):
    response = await client.http.post(
        path, content=content, headers={"content-type": "application/json"}
    )
    assert_refused(response, None, message)


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"]
)
async def test_other_content_types(client, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    response = await client.http.post("/v1/completions", content=b"{}", headers=headers)
    assert_refused(response, None, "application/json", status=415)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
async def test_forms_of_the_content_type(client, content_type):
    response = await client.http.post(
        "/v1/completions",
        content=b'{"model": "tiny/model", "prompt": "a"}',
        headers={"content-type": content_type},
    )
    assert response.status_code == 200


async def test_control_characters_are_text(client, engine):
    assert (await client.complete(prompt="a\x00\x1fb\u2028")).status_code == 200
    assert engine.submitted[0].source.text == "a\x00\x1fb\u2028"
