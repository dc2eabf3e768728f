"""Small engines for tests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from engine.core import EngineCore
from engine.draft.drafter import Drafter
from engine.draft.policy import FixedPolicy, Policy
from engine.draft.speculator import Speculator
from engine.models.runner import ModelRunner
from engine.request import GenerationRequest, RequestOutput, SamplingParams, TextPrompt
from engine.sampling.grammar import Grammars
from engine.scheduling.blocks import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.serving.admission import ModelLimits
from engine.serving.async_engine import AsyncEngine, OutputStream

_ids = itertools.count()


def byte_tokenizer(vocab_size: int, eos_ids: Sequence[int] = ()) -> Any:
    """What the core needs of a tokenizer: token i stands for one printable character."""
    return SimpleNamespace(
        token_bytes=[bytes([33 + i % 90]) for i in range(vocab_size)],
        special_ids=frozenset(eos_ids),
        eos_ids=frozenset(eos_ids),
    )


def make_request(
    prompt: Sequence[int], request_id: str | None = None, source: Any = None, **params: Any
) -> GenerationRequest:
    defaults: dict[str, Any] = {"max_tokens": 16, "seed": 1, "temperature": 0.0}
    return GenerationRequest(
        request_id=request_id or f"r{next(_ids)}",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**(defaults | params)),
        source=source or TextPrompt(""),
    )


def make_core(
    runner: ModelRunner,
    *,
    drafters: Sequence[Drafter] = (),
    tokenizer: Any = None,
    draft_length: int = 5,
    policy: Policy | None = None,
    max_running: int = 8,
    max_step_tokens: int = 64,
    prefill_chunk: int = 16,
    prefix_cache: bool = True,
    grammars: Grammars | None = None,
    drafter_clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    ticks = itertools.count()
    clock = lambda: float(next(ticks))  # noqa: E731
    return EngineCore(
        model_name="mock",
        target=runner,
        tokenizer=tokenizer or byte_tokenizer(runner.info.vocab_size),
        scheduler=Scheduler(
            BlockPool(runner.num_blocks, runner.block_size, prefix_cache=prefix_cache),
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            prefill_chunk=prefill_chunk,
            clock=clock,
        ),
        speculator=Speculator(drafters, policy or FixedPolicy(draft_length), clock=drafter_clock),
        limits=ModelLimits(runner.num_blocks * runner.block_size, runner.info.vocab_size),
        clock=clock,
        grammars=grammars,
    )


def run_all(
    core: EngineCore, requests: Sequence[GenerationRequest], *, max_steps: int = 20_000
) -> dict[str, list[RequestOutput]]:
    """Run requests to their end, checking integrity after every step."""
    outputs: dict[str, list[RequestOutput]] = {r.request_id: [] for r in requests}
    for request in requests:
        core.limits.check(request)
        core.add(request)
    for _ in range(max_steps):
        if not core.has_work:
            return outputs
        for output in core.step():
            outputs[output.request_id].append(output)
        core.check_integrity()
    raise AssertionError(f"requests left after {max_steps} steps")


async def submit(engine: AsyncEngine, request: GenerationRequest) -> OutputStream:
    """Prepare a request without a grammar and queue it."""
    return engine.submit(request, await engine.prepare(request))


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text_of(outputs: Sequence[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)
