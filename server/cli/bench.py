"""`slipstream bench`: measures a configuration without HTTP."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from engine.config import Config
from loadtest.suites import DEFAULT_SUITE, Entry, SuiteError, read_suite
from server.cli.bench_tables import context_table, decode_table, kernel_table, pass_table
from server.cli.command import CommandError, Run, Subcommand, add_config_arguments
from server.observability.load_progress import showing_progress
from server.observability.logs import configure_logging

if TYPE_CHECKING:
    from engine.bench import BenchPrompt, DecodeFigures, PassFigures
    from engine.build import EngineParts


def _configure(parser: argparse.ArgumentParser) -> Run:
    resolve_config = add_config_arguments(parser)
    parser.add_argument(
        "--suite", type=Path, default=DEFAULT_SUITE, metavar="FILE", help="prompts to decode"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N prompts of each category"
    )
    parser.add_argument("--category", help="only prompts of this category")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every request")
    parser.add_argument(
        "--concurrency", type=int, nargs="*", default=[1, 8], help="requests in flight, in turn"
    )
    parser.add_argument(
        "--predict-code",
        action="store_true",
        help="predict that an answer repeats the prompt's fenced code (Predicted Outputs)",
    )
    parser.add_argument(
        "--context",
        type=_positive_numbers,
        default=(),
        metavar="N,N",
        help="measure prefill and decoding at these lengths instead, in tokens",
    )
    parser.add_argument(
        "--kernel", action="store_true", help="measure the native kernels by layer shape instead"
    )
    parser.add_argument(
        "--rows",
        type=_positive_numbers,
        default=(1, 4, 8, 16, 32),
        metavar="N,N",
        help="activation rows that --kernel takes; default: 1,4,8,16,32",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="measure where native passes spend their time instead",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")

    def run(arguments: argparse.Namespace) -> None:
        config = resolve_config(arguments)
        configure_logging("warning" if config.log_level == "info" else config.log_level)
        console = Console()
        report = _bench_engine
        if arguments.profile:
            report = _profile
        elif arguments.kernel:
            report = _bench_kernels
        elif arguments.context:
            report = _bench_contexts
        figures = report(config, arguments, console)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")

    return run


COMMAND = Subcommand("bench", "measure passes, drafters and throughput without HTTP", _configure)


def _load(config: Config) -> EngineParts:
    from engine.build import load_parts

    with showing_progress():
        return load_parts(config)


def _bench_engine(
    config: Config, arguments: argparse.Namespace, console: Console
) -> dict[str, Any]:
    prompts = _prompts(arguments)
    from engine.bench import Workload, measure_decoding, num_requests

    parts = _load(config)
    passes = _measure_passes(parts)
    for entry in passes:
        console.print(pass_table(entry))
    decoding: list[DecodeFigures] = []
    for concurrency in arguments.concurrency:
        workload = Workload(prompts, arguments.max_tokens, arguments.temperature, concurrency)
        figures: list[DecodeFigures] = []
        try:
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task(
                    f"{concurrency} in flight", total=num_requests(parts, workload)
                )
                advance = partial(progress.advance, task)
                for latest in measure_decoding(parts, workload, advance):
                    figures = latest
        except KeyboardInterrupt:
            console.print("Interrupted: what was measured until then")
        if figures:
            console.print(decode_table(figures, concurrency))
        decoding += figures
    return {
        "passes": [asdict(entry) | {"step_ratios": entry.step_ratios} for entry in passes],
        "decoding": [
            asdict(entry)
            | {"tokens_per_pass": entry.tokens_per_pass, "tokens_per_s": entry.tokens_per_s}
            for entry in decoding
        ],
    }


def _bench_contexts(
    config: Config, arguments: argparse.Namespace, console: Console
) -> dict[str, Any]:
    from engine.bench import ContextError, measure_context

    parts = _load(config)
    chunk = config.scheduler.prefill_chunk
    try:
        figures = [
            measure_context(name, runner, context, chunk=chunk)
            for name, runner in parts.runners.items()
            for context in arguments.context
        ]
    except ContextError as error:
        raise CommandError(f"--context: {error}") from error
    console.print(context_table(figures))
    return {"contexts": [asdict(entry) for entry in figures]}


def _bench_kernels(
    config: Config, arguments: argparse.Namespace, console: Console
) -> dict[str, Any]:
    from engine.bench import measure_kernels

    with showing_progress():
        report = measure_kernels(config, arguments.rows)
    console.print(kernel_table(report))
    return asdict(report)


def _profile(config: Config, arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    from server.cli.profile import print_profiles

    return print_profiles(_load(config), console)


def _prompts(arguments: argparse.Namespace) -> list[BenchPrompt]:
    from engine.bench import BenchPrompt
    from engine.request import ChatPrompt, TextPrompt

    try:
        entries = read_suite(arguments.suite)
    except SuiteError as error:
        raise CommandError(str(error)) from error
    counts: dict[str, int] = {}
    prompts = []
    for entry in entries:
        counts[entry.category] = counts.get(entry.category, 0) + 1
        if arguments.category not in (None, entry.category):
            continue
        if arguments.limit is not None and counts[entry.category] > arguments.limit:
            continue
        source = TextPrompt(entry.prompt) if entry.prompt else ChatPrompt(entry.messages)
        prediction = _fenced_code(entry) if arguments.predict_code else None
        prompts.append(BenchPrompt(entry.category, source, prediction))
    if not prompts:
        raise CommandError(f"{arguments.suite}: no prompts of category {arguments.category!r}")
    return prompts


def _fenced_code(entry: Entry) -> str | None:
    text = entry.prompt or str(entry.messages[-1]["content"])
    _, fence, behind = text.partition("```")
    return behind.partition("\n")[2].partition("```")[0] if fence else None


def _measure_passes(parts: EngineParts) -> list[PassFigures]:
    from engine.bench import measure_passes

    chunk = parts.config.scheduler.prefill_chunk
    return [measure_passes(name, runner, chunk=chunk) for name, runner in parts.runners.items()]


def _positive_numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("must be at least 1 each")
    return numbers
