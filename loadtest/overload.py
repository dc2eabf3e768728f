"""Overload: ten times as many users as the server runs at once, against just as many."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.client import Client, Record
from loadtest.server_state import NotIdleError, read_state, settled_state
from loadtest.target import TargetError, first_model, open_target

MakeBody = Callable[[random.Random], dict[str, Any]]

MAX_SLOWDOWN = 1.5
MAX_MEMORY_GROWTH = 0.02
_REFUSED_PAUSE = 1.0
"""Seconds a refused user waits: not as long as `Retry-After` may ask, so that the load stays on."""
_SAMPLE_SECONDS = 0.5
_PROMPT_WORDS = 24


@dataclass(frozen=True, slots=True)
class Phase:
    """What so many users at once got."""

    users: int
    seconds: float
    records: tuple[Record, ...]
    peak_bytes: int
    """Resident memory of the server."""

    @property
    def accepted(self) -> list[Record]:
        return [record for record in self.records if record.error is None]

    @property
    def num_refused(self) -> int:
        return sum(_is_refused(record) for record in self.records)

    @property
    def failures(self) -> Counter[str]:
        """Errors other than refusals, by kind."""
        return Counter(r.error for r in self.records if r.error and not _is_refused(r))

    @property
    def tpots(self) -> list[float]:
        return [record.tpot for record in self.accepted if record.tpot is not None]

    @property
    def ttfts(self) -> list[float]:
        return [record.ttft for record in self.accepted if record.ttft is not None]

    @property
    def tokens_per_second(self) -> float:
        return sum(record.completion_tokens for record in self.accepted) / self.seconds


@dataclass(frozen=True, slots=True)
class Overload:
    normal: Phase
    overloaded: Phase

    @property
    def slowdowns(self) -> dict[str, float]:
        """Time per output token of accepted requests, overloaded against normal."""
        normal, overloaded = self.normal.tpots, self.overloaded.tpots
        if not normal or not overloaded:
            return {}
        return {
            "median": statistics.median(overloaded) / statistics.median(normal),
            "95%": percentile(overloaded, 95) / percentile(normal, 95),
        }

    @property
    def memory_growth(self) -> float:
        return self.overloaded.peak_bytes / self.normal.peak_bytes - 1

    @property
    def problems(self) -> list[str]:
        found = [
            f"time per token, {name}: {ratio:.2f}x, over {MAX_SLOWDOWN}x"
            for name, ratio in self.slowdowns.items()
            if ratio > MAX_SLOWDOWN
        ]
        if not self.slowdowns:
            found.append("too few answers to compare")
        if self.memory_growth > MAX_MEMORY_GROWTH:
            found.append(f"memory: {self.memory_growth:+.1%}")
        for kind, count in (self.normal.failures + self.overloaded.failures).items():
            found.append(f"{count} requests failed: {kind}")
        return found


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent don't exceed. At least one value."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _is_refused(record: Record) -> bool:
    return record.error is not None and record.error.startswith(("HTTP 429", "HTTP 503"))


async def overload(
    base_url: str,
    *,
    concurrency: int,
    factor: int = 10,
    seconds: float,
    max_tokens: int,
    api_key: str = "none",
    model: str | None = None,
) -> Overload:
    """Run both phases, after a warm-up that makes the server's buffers as large as they get.

    Memory for logits grows with the most rows that a step has had, so the warm-up's requests
    repeat themselves, some greedy, some sampled: there are drafts for every running request.

    Args:
        concurrency: requests the server runs at once (its scheduler.max_running).
        factor: how many times as many users overload it.
        seconds: length of each phase; requests in progress then are finished.

    Raises:
        TargetError: the server can't be reached, or shows no metrics.
        NotIdleError: the server does not come to rest.
    """
    async with open_target(base_url, api_key) as http:
        name = model or await first_model(http)
        client = Client(http, {"model": name, "max_tokens": max_tokens, "ignore_eos": True})
        phases = []
        for users, length, make_body in (
            (concurrency * factor, seconds / 4, _repetitive),
            (concurrency, seconds, _random),
            (concurrency * factor, seconds, _random),
        ):
            phases.append(await _phase(http, client, users, length, make_body))
            try:
                await settled_state(http)
            except (httpx.HTTPError, KeyError) as error:
                raise TargetError(f"{base_url}: the metrics can't be read: {error!r}") from error
    _, normal, overloaded = phases
    return Overload(normal, overloaded)


def _repetitive(rng: random.Random) -> dict[str, Any]:
    first, second = rng.sample(range(1000), 2)
    prompt = f"{first} {second} " * _PROMPT_WORDS
    return {"prompt": prompt, "temperature": rng.choice((0.0, 0.8)), "seed": first}


def _random(rng: random.Random) -> dict[str, Any]:
    prompt = " ".join(str(rng.randint(0, 999)) for _ in range(_PROMPT_WORDS))
    return {"prompt": prompt, "temperature": 0.8, "seed": rng.randint(0, 2**31)}


async def _phase(
    http: httpx.AsyncClient, client: Client, users: int, seconds: float, make_body: MakeBody
) -> Phase:
    records: list[Record] = []
    began = time.monotonic()
    watching = asyncio.create_task(_peak_memory(http, began + seconds))
    async with asyncio.TaskGroup() as group:
        for number in range(users):
            rng = random.Random(number)
            group.create_task(_user(client, records, make_body, rng, began + seconds))
    return Phase(users, time.monotonic() - began, tuple(records), await watching)


async def _user(
    client: Client, records: list[Record], make_body: MakeBody, rng: random.Random, deadline: float
) -> None:
    while time.monotonic() < deadline:
        record = await client.send("overload", "/v1/completions", make_body(rng))
        records.append(record)
        if record.error is not None:
            await asyncio.sleep(_REFUSED_PAUSE)


async def _peak_memory(http: httpx.AsyncClient, deadline: float) -> int:
    peak = 0
    while True:
        try:
            peak = max(peak, (await read_state(http)).resident_bytes)
        except (httpx.HTTPError, KeyError) as error:
            raise TargetError(f"{http.base_url}: the metrics can't be read: {error!r}") from error
        if time.monotonic() > deadline:
            return peak
        await asyncio.sleep(_SAMPLE_SECONDS)


def _figures(phase: Phase) -> dict[str, str]:
    tpots, ttfts = phase.tpots or [math.nan], phase.ttfts or [math.nan]
    return {
        "users": str(phase.users),
        "requests": str(len(phase.records)),
        "accepted": str(len(phase.accepted)),
        "refused": str(phase.num_refused),
        "failed": str(phase.failures.total()),
        "time per token, median": f"{1e3 * statistics.median(tpots):.2f} ms",
        "time per token, 95%": f"{1e3 * percentile(tpots, 95):.2f} ms",
        "time to first token, median": f"{statistics.median(ttfts):.2f} s",
        "time to first token, 95%": f"{percentile(ttfts, 95):.2f} s",
        "tokens a second": f"{phase.tokens_per_second:.1f}",
        "peak memory": f"{phase.peak_bytes / 2**20:.1f} MiB",
    }


def show(result: Overload, console: Console) -> None:
    table = Table(title="As many users as the server runs at once, and many more")
    for head in ("", "normal", "overload"):
        table.add_column(head, justify="right" if head else "left")
    figures = [_figures(phase) for phase in (result.normal, result.overloaded)]
    for label in figures[0]:
        table.add_row(label, *(column[label] for column in figures))
    console.print(table)
    for name, ratio in result.slowdowns.items():
        console.print(f"time per token under overload, {name}: {ratio:.2f}x")
    console.print(f"memory under overload: {result.memory_growth:+.1%}")
    for problem in result.problems:
        console.print(problem, style="red", markup=False)
    console.print("FAILED" if result.problems else "passed")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest overload", description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--concurrency", type=int, required=True, help="the server's scheduler.max_running"
    )
    parser.add_argument("--factor", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", default="none")
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0 when accepted requests keep their speed, 1 if not, 2 when it can't be measured."""
    arguments = make_parser().parse_args(argv)
    try:
        result = asyncio.run(
            overload(
                arguments.base_url,
                concurrency=arguments.concurrency,
                factor=arguments.factor,
                seconds=arguments.seconds,
                max_tokens=arguments.max_tokens,
                api_key=arguments.api_key,
                model=arguments.model,
            )
        )
    except (TargetError, NotIdleError) as error:
        print(f"loadtest overload: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, NotIdleError) else 2
    show(result, Console())
    return 1 if result.problems else 0
