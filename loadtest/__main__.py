"""Loads an OpenAI-compatible server and reports what its users would feel."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest import acceptance, overload, soak
from loadtest.client import Client, Record
from loadtest.load import Amount, Sender, closed_loop, open_loop, poisson_arrivals
from loadtest.output import show, to_json
from loadtest.report import Limits, Report, parse_limits, summarize
from loadtest.suites import DEFAULT_SUITE, Entry, SuiteError, read_suite
from loadtest.target import TargetError, first_model, open_target

_OTHER_TESTS: dict[str, Callable[[Sequence[str]], int]] = {
    "soak": soak.main,
    "overload": overload.main,
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest",
        description=__doc__,
        epilog="other tests: `python -m loadtest soak --help` and `... overload --help`",
    )
    parser.add_argument("base_url", metavar="BASE_URL", help="such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument(
        "--suite", type=Path, default=DEFAULT_SUITE, help=".json or .jsonl file (default: our own)"
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_positive(int),
        default=1,
        metavar="N",
        help="closed loop: N users, each sends the next request when the last is answered",
    )
    load.add_argument(
        "--rate",
        type=_positive(float),
        metavar="R",
        help="open loop: R entries a second on average, at random times (a Poisson process)",
    )
    parser.add_argument(
        "--requests",
        type=_positive(int),
        metavar="N",
        help="entries to send, a conversation being one (default: the suite once)",
    )
    parser.add_argument(
        "--duration", type=_positive(float), metavar="S", help="begin no entry after S seconds"
    )
    parser.add_argument("--warmup", type=int, default=1, help="entries sent first, not counted")
    parser.add_argument("--max-tokens", type=_positive(int), default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and of requests")
    parser.add_argument(
        "--extra", type=json.loads, default={}, metavar="JSON", help="more fields of each request"
    )
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="LIMIT",
        help="count answers within all limits, in seconds: ttft:0.5 tpot:0.05 e2e:10",
    )
    parser.add_argument(
        "--timeout", type=_positive(float), default=600.0, help="seconds of silence"
    )
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report to a file")
    return parser


def _positive(convert: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = convert(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return parse


async def run(arguments: argparse.Namespace, limits: Limits, console: Console) -> Report:
    """Do the whole test.

    Raises:
        SuiteError: the suite can't be read.
        TargetError: the server can't be reached or lists no model, or no request was sent.
    """
    suite = read_suite(arguments.suite)
    async with open_target(arguments.base_url, arguments.api_key, arguments.timeout) as http:
        body = {
            "model": arguments.model or await first_model(http),
            "max_tokens": arguments.max_tokens,
            "temperature": arguments.temperature,
            **arguments.extra,
        }
        client = Client(http, body)
        await closed_loop(
            suite,
            Amount(entries=arguments.warmup),
            1,
            Sender(client, arguments.seed, on_record=lambda _: None),
        )
        before = await acceptance.scrape(http)
        records = await _measure(arguments, suite, client, console)
        after = await acceptance.scrape(http)
    if not records:
        raise TargetError(f"no entry began within {arguments.duration:g} s")
    counted = None if before is None or after is None else acceptance.between(before, after)
    return summarize(records, limits, counted)


async def _measure(
    arguments: argparse.Namespace, suite: list[Entry], client: Client, console: Console
) -> list[Record]:
    entries = arguments.requests
    if entries is None and arguments.duration is None:
        entries = len(suite)
    amount = Amount(entries, arguments.duration)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        turns = None
        if arguments.duration is None:
            turns = sum(1 + len(entry.later_turns) for _, entry in amount.take(suite))
        task = progress.add_task("requests", total=turns)
        sender = Sender(client, arguments.seed, on_record=lambda _: progress.advance(task))
        if arguments.rate is None:
            await closed_loop(suite, amount, arguments.concurrency, sender)
        else:
            arrivals = poisson_arrivals(arguments.rate, arguments.seed)
            await open_loop(suite, amount, arrivals, sender)
    return sender.records


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when every request was answered, 1 when some failed, 2 when none could be sent."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in _OTHER_TESTS:
        return _OTHER_TESTS[argv[0]](argv[1:])
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        limits = parse_limits(arguments.goodput)
    except ValueError as error:
        parser.error(f"--goodput {error}")
    console = Console(stderr=True)
    try:
        report = asyncio.run(run(arguments, limits, console))
    except (SuiteError, TargetError) as error:
        console.print(f"loadtest: error: {error}", style="red", markup=False)
        return 2
    show(report, Console())
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(to_json(report), indent=2) + "\n", encoding="utf-8")
    return 0 if not report.errors else 1


if __name__ == "__main__":
    sys.exit(main())
