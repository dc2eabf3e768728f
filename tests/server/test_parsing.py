"""Reading reasoning and tool calls out of a model's text, whatever its pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import FinishReason, RequestError, RequestOutput, Usage
from server.parsing.answer import AnswerFormat
from server.parsing.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from server.parsing.hermes import HermesParser
from server.parsing.json_blocks import JsonBlockParser
from server.parsing.llama_json import LlamaJsonParser
from server.parsing.reasoning import ReasoningSplitter, ReasoningTokens

WEATHER = (
    '{"name": "weather", "arguments": {"city": "Zoë </tool_call> {\\"", "days": [1, {"x": 2}]}}'
)
ARGUMENTS = '{"city": "Zoë </tool_call> {\\"", "days": [1, {"x": 2}]}'


def read(parser, pieces):
    """(text, calls as [name, arguments]) of an answer that arrives in pieces."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            assert delta.index == len(calls)
            calls.append([delta.name, ""])
        elif isinstance(delta, ToolCallArguments):
            assert delta.index == len(calls) - 1
            assert delta.text
            calls[-1][1] += delta.text
    return "".join(d.text for d in deltas if isinstance(d, TextDelta)), calls


HERMES = [
    ("Hello", ("Hello", [])),
    ("", ("", [])),
    ("  Hi \n", ("  Hi \n", [])),
    (f"<tool_call>\n{WEATHER}\n</tool_call>", ("", [["weather", ARGUMENTS]])),
    (
        f"Let me see.\n\n<tool_call>{WEATHER}</tool_call>\n",
        ("Let me see.", [["weather", ARGUMENTS]]),
    ),
    (
        '<tool_call>{"name":"a","arguments":{}}</tool_call>\n<tool_call>\n{"arguments": {"b": 1}, '
        '"name": "b"}</tool_call>',
        ("", [["a", "{}"], ["b", '{"b": 1}']]),
    ),
    ('<tool_call>{"name": "a"}</tool_call>', ("", [["a", "{}"]])),
    ('<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', ("", [["a", '{"x": 1}']])),
    ('<tool_call>{"id": 3, "name": "a", "arguments": null}</tool_call>', ("", [["a", "{}"]])),
    (
        '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>',
        ("", [["a", '{"x": 1}']]),
    ),
    (
        '<tool_call>{"name": "a", "x": [{"y": "}"}], "arguments": {}}</tool_call>',
        ("", [["a", "{}"]]),
    ),
    # Cut short by max_tokens.
    ('<tool_call>{"name": "a", "arguments": {"x": "lon', ("", [["a", '{"x": "lon']])),
    ('<tool_call>{"name": "a', ('<tool_call>{"name": "a', [])),
    ("text <tool_", ("text <tool_", [])),
    ('<tool_call>{"name": "a", "arguments": {}}</tool', ("", [["a", "{}"]])),
    # What models get wrong.
    ("<tool_call>weather(Paris)</tool_call>", ("<tool_call>weather(Paris)</tool_call>", [])),
    ('<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [])),
    ('<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', [])),
    ('<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call>b', ("b", [["a", '{"x": 1}']])),
    ('<tool_call>{"name": "a", "arguments": {"x": 1</tool_call>', ("", [["a", '{"x": 1']])),
    ('<tool_call>{"name": "a", "arguments": {}} and so on</tool_call>', ("", [["a", "{}"]])),
    (
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        ('<tool_call>{"name": "\\ud800"}</tool_call>', []),
    ),
    ("a < b and <tool> </tool_call> c", ("a < b and <tool> </tool_call> c", [])),
]

LLAMA = [
    ("Hello", ("Hello", [])),
    ("", ("", [])),
    ('{"name": "f", "parameters": {"x": 1}}', ("", [["f", '{"x": 1}']])),
    ('<|python_tag|>{"name": "f", "parameters": {}}', ("", [["f", "{}"]])),
    ('\n {"name": "f", "arguments": {}}\n', ("", [["f", "{}"]])),
    (
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        ("", [["f", "{}"], ["g", "{}"]]),
    ),
    ('{"name": "Bob", "parameters": {}}', ('{"name": "Bob", "parameters": {}}', [])),
    (' {"a": [1, 2]} is JSON', (' {"a": [1, 2]} is JSON', [])),
    ('{"name": "f", "parameters": {"x"', ("", [["f", '{"x"']])),
    ('{"na', ('{"na', [])),
    ('{"name": "f", "parameters": {}} Done.', ("Done.", [["f", "{}"]])),
    ('See {"name": "f", "parameters": {}}', ('See {"name": "f", "parameters": {}}', [])),
    ("<|pyth", ("<|pyth", [])),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "expected"), HERMES)
def test_hermes(text, expected, size):
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(HermesParser(), pieces) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "expected"), LLAMA)
def test_llama(text, expected, size):
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    text, calls = read(LlamaJsonParser({"f", "g"}), pieces)
    assert (text.strip() if calls else text, calls) == expected


FIELDS = '"name": "f", "arguments": {"x": [1, {"y": "} ```"}]}'
ONE = ("", [["f", '{"x": [1, {"y": "} ```"}]}']])
BLOCKS = [
    (f"```json\n{{{FIELDS}}}\n```", ONE),
    (
        '```json\n{\n  "name": "f",\n  "arguments": {\n    "x": 1\n  }\n}\n```\n',
        ("", [["f", '{"x": 1}']]),
    ),
    (f"\n```\n{{{FIELDS}}}```", ONE),
    (f"{{{{{FIELDS}}}}}", ONE),
    (f"{{{{{FIELDS}}}", ONE),
    (f"{{{{{FIELDS}}}}}}} \n", ONE),
    ('{{"name": "f", "arguments": {{"x": {{"y": 1}}}}}}', ("", [["f", '{"x": {"y": 1}}']])),
    (f"```json\n{{{{{FIELDS}}}}}\n```", ONE),
    (f"{{{FIELDS}}}", ONE),
    ('{"name": "f"}', ("", [["f", "{}"]])),
    ('{"name": "f", "arguments": null}', ("", [["f", "{}"]])),
    ('```json\n{"name": "f", "parameters": "{\\"x\\": 1}"}\n```', ("", [["f", '{"x": 1}']])),
    (
        '```json\n{"name": "f", "arguments": {}}\n```\n\n```json\n{"name": "g"}\n```',
        ("", [["f", "{}"], ["g", "{}"]]),
    ),
    ('{"name": "f"}\n{"name": "g"}', ("", [["f", "{}"], ["g", "{}"]])),
]
NO_BLOCKS = [
    "",
    "Hello",
    "```python\nprint(1)\n```",
    '```json\n{"name": "h", "arguments": {}}\n```',
    '```json\n{"name": "John", "age": 3}\n```',
    '```json\n{"name": "f", "age": 3}\n```',
    '```json\n{"name": "f", "arguments": [1]}\n```',
    '```json\n{"name": "f", "arguments": {"x": NaN}}\n```',
    f"So: ```json\n{{{FIELDS}}}\n```",
    f"```json\n{{{FIELDS}}}\n```\nThis calls f.",
    f"{{{{{FIELDS}}}}}}}}}",
    f"{{{FIELDS}}} is the call",
    '```json\n{"name": "f", "arguments": {"x": ',  # cut short by max_tokens
    '```json\n{"na',
    '{"arguments": {}, "name": "f"}',
    "``",
    " {",
]


def split_into(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def block_parser(**options):
    names = {"f", "g"}
    return JsonBlockParser(names, HermesParser(), reads_bare=True, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "expected"), BLOCKS)
def test_an_answer_that_is_nothing_but_json_calls_is_calls(text, expected, size):
    assert read(block_parser(), split_into(text, size)) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("text", NO_BLOCKS)
def test_an_answer_with_anything_else_in_it_is_text(text, size):
    assert read(block_parser(), split_into(text, size)) == (text, [])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "expected"), HERMES)
def test_other_answers_are_read_as_ever(text, expected, size):
    assert read(block_parser(), split_into(text, size)) == expected


def test_calls_of_blocks_beyond_the_limit_are_dropped():
    assert read(block_parser(max_calls=1), ['{"name": "f"}\n{"name": "g"}']) == ("", [["f", "{}"]])


@pytest.mark.parametrize(
    ("pieces", "released_with"),
    [
        (["```", "json\n", "{", '"name": "', "Jo", "hn"], 4),
        (["```", "python"], 1),
        (["{", '"city"'], 1),
        (['{"name": "f"}', "\n", "That"], 2),
        (["Hi"], 0),
    ],
)
def test_text_is_released_as_soon_as_it_can_be_no_call(pieces, released_with):
    parser = block_parser()
    for piece in pieces[:released_with]:
        assert parser.feed(piece) == []
    released = parser.feed(pieces[released_with])
    assert [type(delta) for delta in released] == [TextDelta]
    assert released[0].text.strip() == "".join(pieces[: released_with + 1]).strip()


def test_llama_calls_without_a_fence_are_streamed_and_fenced_ones_are_calls_too():
    def parser():
        return answer_format("<|python_tag|>", names=("f", "g")).parser()

    deltas = parser().take(output('{"name": "f", "parameters": {"x"'))
    assert deltas == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"x"')]
    fenced = output('```json\n{"name": "f", "parameters": {}}\n```', FinishReason.STOP)
    assert parser().take(fenced) == [ToolCallStart(0, "f"), ToolCallArguments(0, "{}")]


PARTS = [
    "<tool_call>", "</tool_call>", '{"name": "a"', ", ", '"arguments":', '{"x": "', '\\"', "}", "{",
    "text ", "\n", '"', ":", "null", "é", "```json", "```", "{{", "}}", '"name": "a"',
]  # fmt: skip


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.data())
def test_any_split_reads_the_same_and_loses_no_plain_text(parts, data):
    whole = "".join(parts)
    pieces, rest = [], whole
    while rest:
        length = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:length])
        rest = rest[length:]
    for make in (
        HermesParser,
        lambda: LlamaJsonParser({"a"}),
        lambda: JsonBlockParser({"a"}, HermesParser(), reads_bare=True),
    ):
        text, calls = read(make(), pieces)
        assert (text, calls) == read(make(), [whole])
        assert calls or text == whole


@pytest.mark.parametrize("make", [HermesParser, lambda **limit: LlamaJsonParser({"a"}, **limit)])
def test_calls_beyond_the_limit_are_dropped(make):
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    if make is not HermesParser:
        call = '{"name": "a", "arguments": {}};'
    assert read(make(max_calls=1), [call, call, "more"]) == ("", [["a", "{}"]])


def test_arguments_are_streamed_as_they_come():
    parser = HermesParser()
    seen = [
        parser.feed(piece)
        for piece in ['<tool_call>{"name": "a', '", "arguments": {"x', '": 1', "}}"]
    ]
    assert seen == [
        [],
        [ToolCallStart(0, "a"), ToolCallArguments(0, '{"x')],
        [ToolCallArguments(0, '": 1')],
        [ToolCallArguments(0, "}")],
    ]


def split(pieces, starts_inside=False):
    splitter = ReasoningSplitter(starts_inside=starts_inside)
    parts = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    deltas = [delta for deltas, _ in parts for delta in deltas]
    assert all(isinstance(delta, ReasoningDelta) and delta.text for delta in deltas)
    return (
        "".join(d.text for d in deltas),
        "".join(text for _, text in parts),
        splitter.has_reasoning,
    )


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nHm. So\n\nit is.\n</think>\n\nYes.", False, ("Hm. So\n\nit is.", "Yes.", True)),
        ("Hm.\n</think>\n\nYes. ", True, ("Hm.", "Yes. ", True)),
        ("\n<think></think>Yes", False, ("", "Yes", True)),
        ("Yes, <think> is a tag", False, ("", "Yes, <think> is a tag", False)),
        ("  Yes", False, ("", "  Yes", False)),
        ("<thin", False, ("", "<thin", False)),
        ("<think>Hm </thi", False, ("Hm </thi", "", True)),
        ("<think>Hm.\n", False, ("Hm.", "", True)),
        ("Hm </think> a </think> b", True, ("Hm", "a </think> b", True)),
        ("", True, ("", "", True)),
        ("", False, ("", "", False)),
    ],
)
def test_reasoning(text, inside, expected, size):
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert split(pieces, inside) == expected


def test_reasoning_tokens_are_those_up_to_the_closing_tag():
    counter = ReasoningTokens([b"<think>", b"a", b"</th", b"ink>", b"b", b"</think>"])
    counter.add([0, 1, 1])
    counter.add([2, 3, 4])
    counter.add([5, 4])
    assert counter.count == 5


def output(text, finish=None):
    return RequestOutput("", text, (), Usage(1, 1, 0), finish_reason=finish)


def answer_format(template, prompt_end=b"", names=("f",)):
    return AnswerFormat.of(
        template, prompt_end, tool_names=frozenset(names), max_calls=None, token_bytes=[]
    )


def test_calls_come_behind_reasoning():
    parser = answer_format("</think><tool_call>", b"<|im_start|>assistant\n<think>\n").parser()
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    deltas = parser.take(output(f"Maybe {call}</think>\n{call}"))
    deltas += parser.take(output("", FinishReason.STOP))
    assert deltas == [
        ReasoningDelta(f"Maybe {call}"),
        ToolCallStart(0, "f"),
        ToolCallArguments(0, "{}"),
    ]
    assert parser.num_calls == 1


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        ("<tool_call>{json}</tool_call>", "hermes"),
        ("<|python_tag|>", "llama"),
        (
            '{"name": function name, "parameters": dictionary of argument name and its value}',
            "llama",
        ),
    ],
)
def test_the_template_tells_the_form_of_calls(template, calls):
    assert answer_format(template).calls == calls
    assert answer_format(template, names=()).calls is None


@pytest.mark.parametrize("template", ["", "tools", "<tool_call><function=f>", "[TOOL_CALLS]"])
def test_forms_nobody_here_can_read_are_refused(template):
    with pytest.raises(RequestError) as caught:
        answer_format(template)
    assert caught.value.param == "tools"


def test_arguments_in_the_expected_value_are_json():
    assert json.loads(ARGUMENTS)["days"] == [1, {"x": 2}]
