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
from engine.kernels import load_native, native_available
from engine.kernels.bench import BandwidthProbe, KernelReport, bench_kernels
from engine.models.loader import packed_matrices
from engine.models.runner import ModelRunner
from engine.plan import Chunk, StepPlan
from engine.request import ChatPrompt, GenerationRequest, SamplingParams, TextPrompt

STEP_ROWS = (1, 2, 4, 8, 16, 32)
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
    read_gigabytes_per_s: dict[int, float | None]
    """What plain reads of memory reached in between those passes; None off a CPU."""

    @property
    def step_ratios(self) -> dict[int, float]:
        """Cost of a pass relative to one row."""
        return {rows: ms / self.step_ms[1] for rows, ms in self.step_ms.items()}


class ContextError(ValueError):
    """There is no room for a context that is to be measured; tells how much there is."""


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """One request of a model alone, at a length."""

    model: str
    context: int
    prefill_tokens_per_s: float
    """Of the whole prompt."""
    decode_ms: float
    """A token, behind it; median."""
    read_gigabytes_per_s: float | None
    """What plain reads of memory reached in between; None off a CPU."""


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
    """Time prefill chunks and steps of 1 to 32 rows; all row counts take turns in each round."""
    num_tokens = min(max(_CONTEXT + max(STEP_ROWS), chunk), runner.num_blocks * runner.block_size)
    run = _TimedPasses(runner, num_tokens)
    prefill, steps = [], defaultdict(list)
    readings: dict[int, list[float]] = {rows: [] for rows in STEP_ROWS}
    for _ in range(rounds + 1):
        prefill.append(run(0, chunk, first_logit=chunk - 1))
        for rows in STEP_ROWS:
            readings[rows] += run.read_memory()
            steps[rows].append(run(_CONTEXT, rows))
    medians = {rows: statistics.median(times[1:]) for rows, times in steps.items()}
    return PassFigures(
        model=name,
        prefill_tokens_per_s=chunk / statistics.median(prefill[1:]),
        decode_tokens_per_s=1 / medians[1],
        step_ms={rows: 1e3 * seconds for rows, seconds in medians.items()},
        read_gigabytes_per_s={rows: _median_of_any(seen[1:]) for rows, seen in readings.items()},
    )


def measure_context(
    name: str, runner: ModelRunner, context: int, *, chunk: int, rounds: int = 9
) -> ContextFigures:
    """Time the prefill of a prompt of `context` tokens, once, and one-row steps behind it.

    Raises:
        ContextError: the model or its KV blocks hold fewer tokens.
    """
    room = min(runner.num_blocks * runner.block_size, runner.info.max_context)
    if context + 1 > room:
        raise ContextError(f"{name} has room for {room} tokens, not for {context} and one more")
    run = _TimedPasses(runner, context + 1)
    seconds = 0.0
    for start in range(0, context, chunk):
        count = min(chunk, context - start)
        seconds += run(start, count, first_logit=count)
    steps: list[float] = []
    readings: list[float] = []
    for _ in range(rounds):
        readings += run.read_memory()
        steps.append(run(context, 1))
    return ContextFigures(
        model=name,
        context=context,
        prefill_tokens_per_s=context / seconds,
        decode_ms=1e3 * statistics.median(steps),
        read_gigabytes_per_s=_median_of_any(readings),
    )


class _TimedPasses:
    """Passes over random tokens of one request, and readings of memory between them."""

    def __init__(self, runner: ModelRunner, num_tokens: int) -> None:
        rng = np.random.default_rng(0)
        self._runner = runner
        self._tokens = rng.integers(0, runner.info.vocab_size, num_tokens).astype(np.int32)
        self._blocks = tuple(range(-(-num_tokens // runner.block_size)))
        self._probe = None
        if native_available() is None and runner.info.threads is not None:
            self._probe = BandwidthProbe(load_native().ThreadPool(runner.info.threads))

    def __call__(self, start: int, count: int, first_logit: int = 0) -> float:
        """Seconds of a pass over `count` tokens from position `start` on."""
        tokens = self._tokens[start : start + count]
        blocks = self._blocks[: -(-(start + count) // self._runner.block_size)]
        chunk = Chunk("bench", start, tokens, blocks, count - 1, first_logit)
        began = time.perf_counter()
        self._runner.execute(StepPlan((chunk,)))
        return time.perf_counter() - began

    def read_memory(self) -> list[float]:
        """One reading in 1e9 bytes a second; none where passes do not read a CPU's memory."""
        return [] if self._probe is None else [self._probe.read()]


def _median_of_any(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def measure_kernels(config: Config, rows: Sequence[int]) -> KernelReport:
    """Time the native kernels on every layer shape of the configured target.

    Args:
        rows: numbers of activation rows to take.

    Raises:
        UnsupportedModelError: the native decoder can't run the model here; says why.
    """
    threads, matrices = packed_matrices(config)
    return bench_kernels(matrices, threads=threads, rows=rows)


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
