"""From a request's structured-output fields and tools to the engine's grammars."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.request import GrammarSpec, Prelude, RequestError
from server.apis.shared.grammar.constraints import Constraint, constraints, prepare_constraint
from server.apis.shared.grammar.schema_faults import Suspect, explained
from server.apis.shared.grammar.tool_calls import (
    PreparedTool,
    ToolCalls,
    calls_or_answer,
    grammar_for_tools,
    prepared_tools,
)
from server.apis.shared.schema.structured import StructuredFields
from server.context import ServerContext
from server.observability.request_record import current_record

if TYPE_CHECKING:
    from engine.sampling.grammar_compiler import CompiledGrammar


async def prepare_grammar(
    fields: StructuredFields,
    context: ServerContext,
    prelude: Prelude | None = None,
    calls: ToolCalls | None = None,
) -> CompiledGrammar | None:
    """What the output must match; None: nothing.

    Args:
        prelude: free text that may come first, such as a model's reasoning.
        calls: what the model may write instead of JSON that is asked for. If they are forced,
            a `response_format` is no contradiction, as at OpenAI: there is no text to format.

    Raises:
        RequestError: two fields constrain the output, or one can't be used; names it.
    """
    wanted = list(constraints(fields))
    if calls is not None and calls.forced is not None:
        others = [c for c in wanted if not c.param.startswith("response_format")]
        _require_one([*(c.param for c in others), "tool_choice"])
        return await _of_calls(calls, context, prelude)
    if not wanted:
        return None
    _require_one([constraint.param for constraint in wanted])
    return await _of_constraint(wanted[0], context, prelude, calls)


async def compile_grammar(spec: GrammarSpec, context: ServerContext, param: str) -> CompiledGrammar:
    """Have the engine make a grammar ready.

    Raises:
        RequestError: it can't be used; names `param`.
    """
    limit = context.config.limits.max_schema_seconds
    try:
        return await context.engine.compile_grammar(spec, time_limit=limit)
    except RequestError as error:
        raise RequestError(f"Invalid value for '{param}': {error}", param=param) from error


async def _of_constraint(
    constraint: Constraint,
    context: ServerContext,
    prelude: Prelude | None,
    calls: ToolCalls | None,
) -> CompiledGrammar:
    param = constraint.param
    prepared = await asyncio.to_thread(prepare_constraint, constraint, context.config.limits)
    _tell_not_enforced(param, prepared.not_enforced)
    spec = replace(prepared.spec, prelude=prelude)
    try:
        grammar = await compile_grammar(spec, context, param)
    except RequestError as error:
        if constraint.kind != "json_schema":
            raise
        suspect = Suspect(param, "", prepared.given, constraint.strict)
        raise await explained(error, [suspect], context) from error
    if calls is None or not constraint.is_json:
        return grammar
    answer: Mapping[str, Any] = json.loads(spec.text) if spec.text else {"type": "object"}
    tools = await _prepared_tools(calls, context)
    return await compile_grammar(calls_or_answer(calls, tools, answer, prelude), context, param)


async def _of_calls(
    calls: ToolCalls, context: ServerContext, prelude: Prelude | None
) -> CompiledGrammar:
    tools = await _prepared_tools(calls, context)
    try:
        return await compile_grammar(
            grammar_for_tools(calls, tools, prelude), context, "tool_choice"
        )
    except RequestError as error:
        suspects = [
            Suspect(tool.param, f"tool '{tool.name}': ", tool.given, tool.strict) for tool in tools
        ]
        raise await explained(error, suspects, context) from error


async def _prepared_tools(calls: ToolCalls, context: ServerContext) -> list[PreparedTool]:
    tools = await asyncio.to_thread(prepared_tools, calls, context.config.limits)
    for tool in tools:
        _tell_not_enforced(tool.param, tool.not_enforced)
    return tools


def _require_one(params: Sequence[str]) -> None:
    if len(params) > 1:
        first, second, *_ = params
        raise RequestError(
            f"'{first}' and '{second}' both constrain the output; set only one of them.",
            param=second,
        )


def _tell_not_enforced(param: str, pointers: Sequence[str]) -> None:
    record = current_record.get()
    if record is not None:
        record.not_enforced += [f"{param}#{pointer}" for pointer in pointers]
