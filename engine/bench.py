"""Measures a loaded engine without HTTP: passes, drafters, throughput."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.build import EngineParts
from engine.core import EngineCore
from engine.draft.drafter import Drafter
from engine.models.runner import ModelRunner
from engine.plan import Slice, StepPlan
from engine.request import ChatPrompt, GenerationRequest, SamplingParams, TextPrompt

STEP_ROWS = (1, 2, 4, 8, 16)
_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt of a suite."""

    category: str
    source: ChatPrompt | TextPrompt


@dataclass(frozen=True, slots=True)
class PassFigures:
    """Forward passes of one model alone; medians."""

    model: str
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """One row a pass."""
    step_ms: dict[int, float]
    """Milliseconds of a pass by number of rows (one committed token and its draft)."""

    @property
    def step_ratios(self) -> dict[int, float]:
        """Cost of a pass relative to one row."""
        return {rows: ms / self.step_ms[1] for rows, ms in self.step_ms.items()}


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """A suite decoded with one choice of drafters."""

    drafters: str
    category: str
    concurrency: int
    requests: int
    tokens: int
    target_passes: int
    seconds: float
    """From the first token on, for one request at a time; else of the whole run."""

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(1, self.target_passes)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(1e-9, self.seconds)


def measure_passes(name: str, runner: ModelRunner, *, chunk: int, rounds: int = 9) -> PassFigures:
    """Time prefill chunks and steps of 1 to 16 rows; all row counts take turns in each round."""
    rng = np.random.default_rng(0)
    num_tokens = min(max(_CONTEXT + max(STEP_ROWS), chunk), runner.num_blocks * runner.block_size)
    tokens = rng.integers(0, runner.info.vocab_size, num_tokens).astype(np.int32)
    blocks = tuple(range(-(-num_tokens // runner.block_size)))

    def run(start: int, count: int, first_logit: int) -> float:
        piece = Slice("bench", start, tokens[start : start + count], blocks, count - 1, first_logit)
        began = time.perf_counter()
        runner.execute(StepPlan((piece,)))
        return time.perf_counter() - began

    prefill, steps = [], defaultdict(list)
    for _ in range(rounds + 1):
        prefill.append(run(0, chunk, chunk - 1))
        for rows in STEP_ROWS:
            steps[rows].append(run(_CONTEXT, rows, 0))
    medians = {rows: statistics.median(times[1:]) for rows, times in steps.items()}
    return PassFigures(
        model=name,
        prefill_tokens_per_s=chunk / statistics.median(prefill[1:]),
        decode_tokens_per_s=1 / medians[1],
        step_ms={rows: 1e3 * seconds for rows, seconds in medians.items()},
    )


def measure_decoding(
    parts: EngineParts,
    prompts: Sequence[BenchPrompt],
    *,
    max_tokens: int,
    concurrency: int,
    on_request: Callable[[], None],
) -> Iterator[list[DecodeFigures]]:
    """Decode a suite greedily, plain first and then with each drafter and all of them together.

    Args:
        concurrency: requests in flight.
        on_request: called after each finished request.

    Yields:
        For each choice of drafters its figures by category, and over "all".
    """
    for label, drafters in drafter_choices(parts):
        core = parts.assemble(drafters)
        if concurrency == 1:
            yield _one_by_one(core, label, prompts, max_tokens, on_request)
        else:
            yield [_all_at_once(core, label, prompts, max_tokens, concurrency, on_request)]


def drafter_choices(parts: EngineParts) -> list[tuple[str, tuple[Drafter, ...]]]:
    """Plain decoding, each drafter alone and, where there are several, all in their order."""
    choices: list[tuple[str, tuple[Drafter, ...]]] = [("plain", ())]
    choices += [(drafter.name, (drafter,)) for drafter in parts.drafters]
    if len(parts.drafters) > 1:
        choices.append(("+".join(d.name for d in parts.drafters), parts.drafters))
    return choices


def _request(
    core: EngineCore, index: int, prompt: BenchPrompt, max_tokens: int
) -> GenerationRequest:
    source = prompt.source
    if isinstance(source, ChatPrompt):
        ids = core.tokenizer.encode_chat(source.messages)
    else:
        ids = core.tokenizer.encode(source.text)
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
    return GenerationRequest(f"bench-{index}", tuple(ids), params, source)


def _one_by_one(
    core: EngineCore,
    label: str,
    prompts: Sequence[BenchPrompt],
    max_tokens: int,
    on_request: Callable[[], None],
) -> list[DecodeFigures]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
    for index, prompt in enumerate(prompts):
        core.add(_request(core, index, prompt, max_tokens))
        passes_before, first, num_tokens = core.metrics.target_passes, None, 0
        while core.has_work:
            num_tokens += sum(len(output.token_ids) for output in core.step())
            if first is None and num_tokens:
                first = time.perf_counter()
                # The first token comes from the prefill; decoding is what is measured.
                num_tokens, passes_before = 0, core.metrics.target_passes
        seconds = time.perf_counter() - (first or 0.0)
        passes = core.metrics.target_passes - passes_before
        for category in (prompt.category, "all"):
            for position, value in enumerate((1, num_tokens, passes, seconds)):
                sums[category][position] += value
        on_request()
    return [
        DecodeFigures(label, category, 1, int(n), int(tokens), int(passes), seconds)
        for category, (n, tokens, passes, seconds) in sums.items()
    ]


def _all_at_once(
    core: EngineCore,
    label: str,
    prompts: Sequence[BenchPrompt],
    max_tokens: int,
    concurrency: int,
    on_request: Callable[[], None],
) -> DecodeFigures:
    waiting = [_request(core, i, prompt, max_tokens) for i, prompt in enumerate(prompts)][::-1]
    in_flight = num_tokens = 0
    began = time.perf_counter()
    while waiting or core.has_work:
        while waiting and in_flight < concurrency:
            core.add(waiting.pop())
            in_flight += 1
        for output in core.step():
            num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                in_flight -= 1
                on_request()
    seconds = time.perf_counter() - began
    passes = core.metrics.target_passes
    return DecodeFigures(label, "all", concurrency, len(prompts), num_tokens, passes, seconds)
