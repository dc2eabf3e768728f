"""Offers load: a fixed number of users (closed loop), or arrivals at a rate (open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, takewhile

from loadtest.client import Client, Clock, Record
from loadtest.suites import Entry

Send = Callable[[int, Entry, float | None], Coroutine[None, None, None]]
"""Does one entry: its number, the entry, and when it is due (None: now)."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much work is offered: a number of entries, a time in seconds, or whichever ends first."""

    entries: int | None = None
    seconds: float | None = None

    def take(self, suite: list[Entry]) -> Iterator[tuple[int, Entry]]:
        """The suite's entries, numbered, again from the start when they run out."""
        return islice(enumerate(cycle(suite)), self.entries)


async def closed_loop(
    suite: list[Entry],
    amount: Amount,
    concurrency: int,
    send: Send,
    clock: Clock = time.perf_counter,
) -> None:
    """`concurrency` users, each of whom begins the next entry when the last is answered."""
    work = amount.take(suite)
    start = clock()

    async def user() -> None:
        for number, entry in work:
            if amount.seconds is not None and clock() - start >= amount.seconds:
                return
            await send(number, entry, None)

    async with asyncio.TaskGroup() as users:
        for _ in range(concurrency):
            users.create_task(user())


async def open_loop(
    suite: list[Entry],
    amount: Amount,
    arrivals: Iterable[float],
    send: Send,
    clock: Clock = time.perf_counter,
) -> None:
    """Entries begin at the given times (seconds from now), however slow the answers are."""
    start = clock()
    seconds = amount.seconds
    if seconds is not None:
        arrivals = takewhile(lambda arrival: arrival < seconds, arrivals)
    async with asyncio.TaskGroup() as entries:
        for arrival, (number, entry) in zip(arrivals, amount.take(suite), strict=False):
            due = start + arrival
            await asyncio.sleep(due - clock())
            entries.create_task(send(number, entry, due))


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Times of a Poisson process with `rate` arrivals a second: gaps are exponential."""
    rng = random.Random(seed)
    arrival = 0.0
    while True:
        arrival += rng.expovariate(rate)
        yield arrival


class Sender:
    """Sends entries, every turn of a conversation after the answer before it; keeps the records."""

    def __init__(self, client: Client, seed: int, on_record: Callable[[Record], None]) -> None:
        """
        Args:
            seed: request seeds count up from here, so that a run can be repeated.
        """
        self._client = client
        self._seed = seed
        self._on_record = on_record
        self.records: list[Record] = []

    async def __call__(self, number: int, entry: Entry, due: float | None) -> None:
        common = {"seed": self._seed + number, **entry.options}
        if entry.prompt is not None:
            body = {**common, "prompt": entry.prompt}
            await self._send(entry.category, "/v1/completions", body, due)
            return
        messages = list(entry.messages)
        turns = iter(entry.later_turns)
        while True:
            body = {**common, "messages": messages}
            record = await self._send(entry.category, "/v1/chat/completions", body, due)
            turn = next(turns, None)
            if turn is None or record.error is not None:
                return
            messages = [
                *messages,
                {"role": "assistant", "content": record.text},
                {"role": "user", "content": turn},
            ]
            due = None

    async def _send(
        self, category: str, path: str, body: dict[str, object], due: float | None
    ) -> Record:
        record = await self._client.send(category, path, body, due)
        self.records.append(record)
        self._on_record(record)
        return record
