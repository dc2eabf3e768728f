"""Measures a loaded engine without HTTP: passes, drafters, throughput."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.build import EngineParts
from engine.config import Config
from engine.core import EngineCore
from engine.draft.drafter import Drafter
from engine.kernels.bench import KernelReport, bench_kernels
from engine.models.loader import packed_matrices
from engine.models.runner import ModelRunner
from engine.plan import Chunk, StepPlan
from engine.request import ChatPrompt, GenerationRequest, SamplingParams, TextPrompt

STEP_ROWS = (1, 2, 4, 8, 16)
_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt of a suite."""

    category: str
    source: ChatPrompt | TextPrompt
    prediction: str | None = None
    """What the client would predict (see OpenAI's Predicted Outputs)."""


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
class Workload:
    """Prompts and how they are decoded."""

    prompts: Sequence[BenchPrompt]
    max_tokens: int
    temperature: float = 0.0
    concurrency: int = 1
    """Requests in flight."""


@dataclass(slots=True)
class DecodeFigures:
    """What one choice of drafters did on one category of a workload, or on "all"."""

    drafters: str
    category: str
    concurrency: int
    requests: int = 0
    tokens: int = 0
    target_passes: int = 0
    seconds: float = 0.0
    """One request at a time: from the first token on; else of the whole run."""

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(1, self.target_passes)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(1e-9, self.seconds)

    def add(self, requests: int, tokens: int, target_passes: int, seconds: float) -> None:
        self.requests += requests
        self.tokens += tokens
        self.target_passes += target_passes
        self.seconds += seconds


def measure_passes(name: str, runner: ModelRunner, *, chunk: int, rounds: int = 9) -> PassFigures:
    """Time prefill chunks and steps of 1 to 16 rows; all row counts take turns in each round."""
    rng = np.random.default_rng(0)
    num_tokens = min(max(_CONTEXT + max(STEP_ROWS), chunk), runner.num_blocks * runner.block_size)
    tokens = rng.integers(0, runner.info.vocab_size, num_tokens).astype(np.int32)
    blocks = tuple(range(-(-num_tokens // runner.block_size)))

    def run(start: int, count: int, first_logit: int) -> float:
        chunk = Chunk("bench", start, tokens[start : start + count], blocks, count - 1, first_logit)
        began = time.perf_counter()
        runner.execute(StepPlan((chunk,)))
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


def measure_kernels(config: Config) -> KernelReport:
    """Time the native kernels on every layer shape of the configured target.

    Raises:
        UnsupportedModelError: the native decoder can't run the model here; says why.
    """
    threads, matrices = packed_matrices(config)
    return bench_kernels(matrices, threads=threads)


def measure_decoding(
    parts: EngineParts, workload: Workload, on_request: Callable[[], None]
) -> Iterator[list[DecodeFigures]]:
    """Decode a workload plainly, with each drafter and with all of them.

    Yields the figures so far, after each turn of all the choices.

    The choices take turns, prompt by prompt, or when several requests are in flight by twice as
    many prompts as are in flight, so that a change of the machine's speed meets them all.

    Args:
        on_request: called after each finished request.
    """
    cores = {
        # No prefix cache: the cores share the KV memory and overwrite each other's blocks.
        label: parts.assemble(drafters, prefix_cache=False)
        for label, drafters in drafter_choices(parts)
    }
    for core in cores.values():
        core.warm_up()
    figures: dict[tuple[str, str], DecodeFigures] = {}
    size = 2 * workload.concurrency if workload.concurrency > 1 else 1
    for number in range(0, len(workload.prompts), size):
        batch = workload.prompts[number : number + size]
        for label, core in cores.items():
            requests = [
                _request(core, number + index, prompt, workload)
                for index, prompt in enumerate(batch)
            ]
            if workload.concurrency > 1:
                categories, counts = ["all"], _run_together(core, requests, workload, on_request)
            else:
                categories, counts = [batch[0].category, "all"], _run_alone(core, requests[0])
                on_request()
            for category in categories:
                entry = figures.setdefault(
                    (label, category), DecodeFigures(label, category, workload.concurrency)
                )
                entry.add(len(batch), *counts)
        yield list(figures.values())


def drafter_choices(parts: EngineParts) -> list[tuple[str, tuple[Drafter, ...]]]:
    """Plain decoding, each drafter alone and, where there are several, all together."""
    choices: list[tuple[str, tuple[Drafter, ...]]] = [("plain", ())]
    choices += [(drafter.name, (drafter,)) for drafter in parts.drafters]
    if len(parts.drafters) > 1:
        choices.append(("all", parts.drafters))
    return choices


def num_requests(parts: EngineParts, workload: Workload) -> int:
    """Requests that `measure_decoding` makes."""
    return len(drafter_choices(parts)) * len(workload.prompts)


def _request(
    core: EngineCore, index: int, prompt: BenchPrompt, workload: Workload
) -> GenerationRequest:
    source = prompt.source
    if isinstance(source, ChatPrompt):
        ids = core.tokenizer.encode_chat(source.messages)
    else:
        ids = core.tokenizer.encode(source.text)
    params = SamplingParams(
        max_tokens=workload.max_tokens, seed=index, temperature=workload.temperature
    )
    return GenerationRequest(
        f"bench-{index}", tuple(ids), params, source, prediction=prompt.prediction
    )


def _run_alone(core: EngineCore, request: GenerationRequest) -> tuple[int, int, float]:
    """Tokens, target passes and seconds behind the first token, which the prefill gives."""
    core.add(request)
    num_tokens = 0
    while core.has_work and not num_tokens:
        num_tokens = sum(len(output.token_ids) for output in core.step())
    passes, began, num_tokens = core.metrics.target_passes, time.perf_counter(), 0
    while core.has_work:
        num_tokens += sum(len(output.token_ids) for output in core.step())
    return num_tokens, core.metrics.target_passes - passes, time.perf_counter() - began


def _run_together(
    core: EngineCore,
    requests: Sequence[GenerationRequest],
    workload: Workload,
    on_request: Callable[[], None],
) -> tuple[int, int, float]:
    waiting, in_flight, num_tokens = list(reversed(requests)), 0, 0
    passes, began = core.metrics.target_passes, time.perf_counter()
    while waiting or core.has_work:
        while waiting and in_flight < workload.concurrency:
            core.add(waiting.pop())
            in_flight += 1
        for output in core.step():
            num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                in_flight -= 1
                on_request()
    return num_tokens, core.metrics.target_passes - passes, time.perf_counter() - began
