"""Soak: mixed traffic for a long time, then a look at what the server still holds."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.server_state import NotIdleError, ServerState, read_state, settled_state
from loadtest.target import TargetError, first_model, open_target
from loadtest.traffic import Fault, Traffic

MAX_MEMORY_GROWTH = 0.02
_NUM_REFERENCES = 20
_NUM_SHOWN = 10


@dataclass(slots=True)
class Tally:
    """What came of the requests."""

    sent: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Kind of request, and what was wrong."""


@dataclass(frozen=True, slots=True)
class Soak:
    seconds: float
    tally: Tally
    before: ServerState
    """Idle, after the warm-up."""
    after: ServerState
    """Idle, at the end."""

    @property
    def memory_growth(self) -> float:
        return self.after.resident_bytes / self.before.resident_bytes - 1

    @property
    def leaks(self) -> list[str]:
        """What the server holds at the end and did not after the warm-up."""
        found = []
        if self.after.tasks > self.before.tasks:
            found.append(f"tasks: {self.before.tasks} -> {self.after.tasks}")
        if self.after.descriptors > self.before.descriptors:
            found.append(f"descriptors: {self.before.descriptors} -> {self.after.descriptors}")
        if self.memory_growth > MAX_MEMORY_GROWTH:
            found.append(f"memory: {self.memory_growth:+.1%}")
        return found

    @property
    def passed(self) -> bool:
        return not self.leaks and not self.tally.faults and bool(self.tally.sent)


async def soak(
    base_url: str,
    *,
    seconds: float,
    warm_up_seconds: float,
    clients: int,
    api_key: str = "none",
    model: str | None = None,
    long_tokens: int = 200,
    seed: int = 0,
) -> Soak:
    """Run it.

    Args:
        warm_up_seconds: traffic in front, in which caches fill; counts neither as time nor as
            growth, but its faults count.

    Raises:
        TargetError: the server can't be reached, or shows no metrics.
        NotIdleError: the server does not come to rest.
    """
    tally = Tally()
    async with open_target(base_url, api_key) as watcher:
        name = model or await first_model(watcher)
        try:
            await read_state(watcher)
        except (httpx.HTTPError, KeyError) as error:
            raise TargetError(f"{base_url}: the metrics can't be read: {error!r}") from error
        states = []
        for phase, length in enumerate((warm_up_seconds, seconds)):
            async with open_target(base_url, api_key) as http:
                traffic = Traffic(http, name, long_tokens=long_tokens)
                traffic.references = await traffic.make_references(_NUM_REFERENCES)
                async with asyncio.TaskGroup() as group:
                    for number in range(clients):
                        rng = random.Random(f"{seed}/{phase}/{number}")
                        group.create_task(_client(traffic, tally, rng, length))
            states.append(await settled_state(watcher))
    return Soak(seconds, tally, *states)


async def _client(traffic: Traffic, tally: Tally, rng: random.Random, seconds: float) -> None:
    kinds = traffic.kinds
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        kind = rng.choice(list(kinds))
        tally.sent[kind] += 1
        try:
            await kinds[kind](rng)
        except Fault as fault:
            tally.faults.append(f"{kind}: {fault}")
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            tally.faults.append(f"{kind}: {error!r}")


def show(result: Soak, console: Console) -> None:
    requests = Table(title=f"Requests in {result.seconds:.0f} s")
    requests.add_column("kind")
    requests.add_column("sent", justify="right")
    requests.add_column("faults", justify="right")
    faults = Counter(fault.partition(":")[0] for fault in result.tally.faults)
    for kind, sent in sorted(result.tally.sent.items()):
        requests.add_row(kind, str(sent), str(faults[kind]))
    requests.add_row("all", str(result.tally.sent.total()), str(faults.total()))
    console.print(requests)
    held = Table(title="Held by the idle server")
    for head in ("", "after the warm-up", "at the end"):
        held.add_column(head, justify="left" if not head else "right")
    before, after = result.before, result.after
    for label, values in (
        ("KV blocks, share", (before.kv_usage, after.kv_usage)),
        ("tasks", (before.tasks, after.tasks)),
        ("descriptors", (before.descriptors, after.descriptors)),
        ("memory, MiB", (before.resident_bytes / 2**20, after.resident_bytes / 2**20)),
    ):
        held.add_row(label, *(f"{value:.6g}" for value in values))
    console.print(held)
    for fault in result.tally.faults[:_NUM_SHOWN]:
        console.print(fault, style="red", markup=False)
    for leak in result.leaks:
        console.print(f"leak: {leak}", style="red", markup=False)
    console.print("passed" if result.passed else "FAILED")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest soak", description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--warm-up-minutes", type=float, help="default: a tenth of --minutes, in front of it"
    )
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--long-tokens", type=int, default=200, help="of the long requests")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0 when all is well, 1 for a fault or a leak, 2 when the server can't be soaked."""
    arguments = make_parser().parse_args(argv)
    seconds = 60 * arguments.minutes
    warm_up = arguments.warm_up_minutes
    try:
        result = asyncio.run(
            soak(
                arguments.base_url,
                seconds=seconds,
                warm_up_seconds=seconds / 10 if warm_up is None else 60 * warm_up,
                clients=arguments.clients,
                api_key=arguments.api_key,
                model=arguments.model,
                long_tokens=arguments.long_tokens,
                seed=arguments.seed,
            )
        )
    except (TargetError, NotIdleError) as error:
        print(f"loadtest soak: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, NotIdleError) else 2
    show(result, Console())
    return 0 if result.passed else 1
