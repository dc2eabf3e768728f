"""`slipstream doctor`: examines this machine, or a pair of target and draft on it."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from engine.config import Config
from loadtest.suites import DEFAULT_SUITE, SuiteError, read_suite
from server.cli.command import CommandError, Run, Subcommand, add_config_arguments
from server.cli.machine import STDOUT, examine_and_print, write_json
from server.observability.logs import configure_logging

if TYPE_CHECKING:
    from engine.doctor.acceptance import Acceptance
    from engine.doctor.report import Report
    from engine.request import ChatPrompt, TextPrompt


def _configure(parser: argparse.ArgumentParser) -> Run:
    resolve_config = add_config_arguments(parser)
    parser.add_argument(
        "--prompts",
        type=Path,
        default=DEFAULT_SUITE,
        metavar="FILE",
        help="prompts like those to be served: .json or .jsonl, as bench's suites",
    )
    parser.add_argument(
        "--limit", type=int, default=2, metavar="N", help="only the first N of each category"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of an answer")
    parser.add_argument(
        "--compare-argmax",
        action="store_true",
        help="also measure drafts of the likeliest tokens, which do not share the target's noise",
    )
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="also write the figures there; without FILE, to stdout and nothing else",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="also plot acceptance and expected speed"
    )

    def run(arguments: argparse.Namespace) -> None:
        config = resolve_config(arguments)
        configure_logging("warning" if config.log_level == "info" else config.log_level)
        console = Console(stderr=arguments.json == STDOUT, quiet=arguments.json == STDOUT)
        if not config.draft_models:
            if arguments.plot is not None:
                raise CommandError("--plot needs a draft model, such as --draft REF")
            examine_and_print(config, arguments.json, console)
            return
        if arguments.plot is not None:
            _need_matplotlib()
        report = _examine(config, arguments, console)
        from engine.doctor.advice import advise

        advice = advise(report)
        _print(report, advice, console)
        if arguments.json is not None:
            write_json(report.as_json() | {"advice": advice}, arguments.json)
        if arguments.plot is not None:
            _plot(report, arguments.plot)

    return run


COMMAND = Subcommand(
    "doctor", "examine this machine or, with a draft model, the pair on it", _configure
)


def _examine(config: Config, arguments: argparse.Namespace, console: Console) -> Report:
    from engine.cache.errors import CacheError
    from engine.doctor.examine import examine, num_stages
    from engine.doctor.pair import load_pair
    from engine.models.runner import UnsupportedModelError
    from engine.models.source import ModelSourceError
    from engine.request import ChatPrompt, RequestError

    sources = _read_prompts(arguments)
    try:
        pair = load_pair(config)
    except (ModelSourceError, CacheError, UnsupportedModelError) as error:
        raise CommandError(str(error)) from error
    if not pair.parts.tokenizer.has_chat_template:
        sources = [source for source in sources if not isinstance(source, ChatPrompt)]
    if not sources:
        raise CommandError(f"{arguments.prompts}: no prompts that the target can take")
    with Progress(console=console, transient=True) as progress:
        total = num_stages(sources, compare_argmax=arguments.compare_argmax)
        task = progress.add_task("", total=total + 1)
        try:
            return examine(
                pair,
                sources,
                max_tokens=arguments.max_tokens,
                compare_argmax=arguments.compare_argmax,
                on_progress=lambda stage: progress.update(task, description=stage, advance=1),
            )
        except RequestError as error:
            raise CommandError(f"{arguments.prompts}: {error}") from error


def _read_prompts(arguments: argparse.Namespace) -> list[ChatPrompt | TextPrompt]:
    from engine.request import ChatPrompt, TextPrompt

    try:
        entries = read_suite(arguments.prompts)
    except SuiteError as error:
        raise CommandError(str(error)) from error
    counts: Counter[str] = Counter()
    sources: list[ChatPrompt | TextPrompt] = []
    for entry in entries:
        counts[entry.category] += 1
        if counts[entry.category] <= arguments.limit:
            sources.append(TextPrompt(entry.prompt) if entry.prompt else ChatPrompt(entry.messages))
    return sources


def _print(report: Report, advice: tuple[str, ...], console: Console) -> None:
    console.print(f"[bold]{report.draft}[/] drafting for [bold]{report.target}[/]")
    for table in (_facts(report), _costs(report), _acceptance(report)):
        console.print(table)
    for sentence in advice:
        console.print(f"• {sentence}", highlight=False)


def _facts(report: Report) -> Table:
    table = Table(show_header=False)
    table.add_row("drafter", report.drafter)
    table.add_row("vocabulary overlap", f"{report.vocabulary_overlap:.1%} of the draft's tokens")
    if report.divergence is not None:
        table.add_row(
            "KL(target || draft)",
            f"{report.divergence.mean_nats:.3f} nats (median {report.divergence.median_nats:.3f}), "
            f"likeliest token the same at {report.divergence.top1_agreement:.1%} "
            f"of {report.divergence.positions} aligned positions",
        )
    table.add_row("draft pass / target pass", f"{report.costs.ratio:.3f}")
    if report.chat_acceptance is not None and report.raw_text_acceptance is not None:
        table.add_row(
            "acceptance as chat / raw text",
            f"{report.chat_acceptance.rate:.1%} / {report.raw_text_acceptance.rate:.1%}",
        )
    return table


def _costs(report: Report) -> Table:
    table = Table(title="Milliseconds of a pass by rows", title_justify="left")
    table.add_column("")
    for rows in report.costs.target_ms:
        table.add_column(str(rows), justify="right")
    for name, costs in (("target", report.costs.target_ms), ("draft", report.costs.draft_ms)):
        table.add_row(name, *(f"{milliseconds:.1f}" for milliseconds in costs.values()))
    return table


def _acceptance(report: Report) -> Table:
    title = "Acceptance in % by temperature: all, and by position"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    positions = len(report.costs.target_ms) - 1
    table.add_column("")
    for heading in ("all", *map(str, range(1, positions + 1)), "length", "tok/pass", "x plain"):
        table.add_column(heading, justify="right")
    for entry in report.acceptance:
        best = report.best_length(entry)
        speed = str(best), f"{entry.tokens_a_pass(best):.2f}", f"{report.speed_up(entry, best):.2f}"
        table.add_row(f"{entry.temperature:g}", *_percentages(entry, positions), *speed)
    for entry in report.argmax_acceptance:
        table.add_row(f"{entry.temperature:g} argmax", *_percentages(entry, positions))
    return table


def _percentages(entry: Acceptance, positions: int) -> list[str]:
    rates = [f"{100 * rate:.0f}" for rate in entry.by_position]
    return [f"{100 * entry.rate:.1f}", *rates, *[""] * (positions - len(rates))]


def _need_matplotlib() -> None:
    try:
        import matplotlib as matplotlib
    except ImportError as error:
        raise CommandError("--plot needs matplotlib: pip install 'slipstream[doctor]'") from error


def _plot(report: Report, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_position, by_length = figure.subplots(1, 2)
    for entry in report.acceptance:
        label = f"temperature {entry.temperature:g}"
        rates = entry.by_position
        by_position.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
        lengths = range(len(report.costs.target_ms))
        speed_ups = [report.speed_up(entry, length) for length in lengths]
        by_length.plot(lengths, speed_ups, marker="o", label=label)
    by_position.set(xlabel="position in the draft", ylabel="acceptance", ylim=(0, 1.02))
    by_length.set(xlabel="draft length", ylabel="expected speed, plain = 1")
    by_length.axhline(1.0, color="grey", linewidth=0.8)
    by_position.legend()
    figure.suptitle(f"{report.draft} drafting for {report.target}")
    figure.savefig(path, format="png", dpi=120)
