"""A prompt with all that the engine needs of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.request import ChatPrompt, GenerationRequest, Prelude, SamplingParams, TextPrompt
from server.apis.shared.grammar.prepare import prepare_grammar
from server.apis.shared.grammar.tool_calls import ToolCalls
from server.apis.shared.prompt.sampling import priority, sampling_params
from server.apis.shared.prompt.speculation import prediction_text, speculation_params
from server.apis.shared.schema.sampling import SamplingFields
from server.context import ServerContext

if TYPE_CHECKING:
    from engine.preparation import Preparation


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    request: GenerationRequest
    """Of its first choice, which has no id yet."""
    preparation: Preparation

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.request.prompt_token_ids

    @property
    def source(self) -> ChatPrompt | TextPrompt:
        return self.request.source

    @property
    def params(self) -> SamplingParams:
        return self.request.params


async def prepare_prompt(
    context: ServerContext,
    fields: SamplingFields,
    token_ids: tuple[int, ...],
    source: ChatPrompt | TextPrompt,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    prelude: Prelude | None = None,
    calls: ToolCalls | None = None,
) -> PreparedPrompt:
    """
    Args:
        prelude, calls: as `prepare_grammar` takes them.

    Raises:
        RequestError: a field asks for what can't be had, or the loaded model can't serve it.
        EngineDeadError: the engine is not ready.
    """
    engine, config = context.engine, context.config
    params = sampling_params(
        fields,
        config.limits,
        engine.sampling_defaults,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    speculation = speculation_params(fields, engine.drafters)
    prediction = prediction_text(fields, engine.limits.max_context)
    grammar = await prepare_grammar(fields, context, prelude, calls)
    request = GenerationRequest(
        "",
        token_ids,
        params,
        source,
        prediction=prediction,
        speculation=speculation,
        grammar=None if grammar is None else grammar.spec,
        cache_scope=context.cache_scope(fields.cache_salt),
        priority=priority(fields, config.admission),
    )
    return PreparedPrompt(request, await engine.prepare(request, grammar))
