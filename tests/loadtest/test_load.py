from __future__ import annotations

import asyncio
import json
import statistics
from itertools import islice
from math import exp

import httpx
import pytest

from loadtest.client import Client, Record
from loadtest.load import Amount, Sender, closed_loop, open_loop, poisson_arrivals
from loadtest.suites import Entry

SUITE = [Entry("a", prompt="x"), Entry("b", prompt="y"), Entry("c", prompt="z")]


class TestPoissonArrivals:
    RATE = 5.0
    ARRIVALS = tuple(islice(poisson_arrivals(RATE, seed=11), 20_000))

    def test_has_the_rate_and_the_spread_of_exponential_gaps(self) -> None:
        gaps = [b - a for a, b in zip((0.0, *self.ARRIVALS), self.ARRIVALS, strict=False)]
        assert statistics.mean(gaps) == pytest.approx(1 / self.RATE, rel=0.03)
        assert statistics.stdev(gaps) == pytest.approx(1 / self.RATE, rel=0.03)
        longer_than_mean = sum(gap > 1 / self.RATE for gap in gaps) / len(gaps)
        assert longer_than_mean == pytest.approx(exp(-1), rel=0.03)

    def test_counts_in_a_window_vary_as_much_as_they_are_large(self) -> None:
        counts = [0] * int(self.ARRIVALS[-1])
        for arrival in self.ARRIVALS:
            if arrival < len(counts):
                counts[int(arrival)] += 1
        assert statistics.mean(counts) == pytest.approx(self.RATE, rel=0.03)
        assert statistics.variance(counts) == pytest.approx(self.RATE, rel=0.1)

    def test_is_repeated_by_its_seed(self) -> None:
        assert tuple(islice(poisson_arrivals(self.RATE, seed=11), 50)) == self.ARRIVALS[:50]
        assert tuple(islice(poisson_arrivals(self.RATE, seed=12), 50)) != self.ARRIVALS[:50]


class TestClosedLoop:
    async def test_keeps_so_many_users_busy(self) -> None:
        active, most, numbers = 0, 0, []

        async def send(number: int, entry: Entry, due: float | None) -> None:
            nonlocal active, most
            active += 1
            most = max(most, active)
            numbers.append((number, entry.category, due))
            await asyncio.sleep(0.001 * (number % 3))
            active -= 1

        await closed_loop(SUITE, Amount(entries=10), 4, send)
        assert most == 4
        assert sorted(numbers) == [(n, "abc"[n % 3], None) for n in range(10)]

    async def test_begins_nothing_after_its_time(self) -> None:
        now, begun = 0.0, []

        async def send(number: int, entry: Entry, due: float | None) -> None:
            nonlocal now
            begun.append(now)
            now += 4.0

        await closed_loop(SUITE, Amount(seconds=10.0), 1, send, clock=lambda: now)
        assert begun == [0.0, 4.0, 8.0]


class TestOpenLoop:
    async def test_does_not_wait_for_answers(self) -> None:
        release = asyncio.Event()
        begun: list[int] = []

        async def send(number: int, entry: Entry, due: float | None) -> None:
            begun.append(number)
            if len(begun) == 5:
                release.set()
            await asyncio.wait_for(release.wait(), timeout=5)

        await open_loop(SUITE, Amount(entries=5), (0.002 * n for n in range(100)), send)
        assert begun == [0, 1, 2, 3, 4]

    async def test_is_due_on_time_and_stops_in_time(self) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        due_times: list[float] = []

        async def send(number: int, entry: Entry, due: float | None) -> None:
            assert due is not None
            assert loop.time() >= due
            due_times.append(due - start)

        arrivals = [0.0, 0.01, 0.02, 0.05, 0.06]
        await open_loop(SUITE, Amount(seconds=0.05), arrivals, send, clock=loop.time)
        assert due_times == pytest.approx([0.0, 0.01, 0.02], abs=0.005)


class TestSender:
    async def run(
        self, entry: Entry, *, fail_at: int | None = None
    ) -> tuple[list[tuple[str, dict[str, object]]], list[Record]]:
        """Answers are ``answer 0``, ``answer 1`` and so on."""
        bodies: list[tuple[str, dict[str, object]]] = []

        def handler(request: httpx.Request) -> httpx.Response:
            number = len(bodies)
            bodies.append((request.url.path, json.loads(request.content)))
            if number == fail_at:
                return httpx.Response(500)
            chunk = {"choices": [{"delta": {"content": f"answer {number}"}}]}
            end = {
                "choices": [{"delta": {}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 2},
            }
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in (chunk, end))
            return httpx.Response(200, text=text + "data: [DONE]\n\n")

        seen: list[Record] = []
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(handler), base_url="http://test"
        ) as http:
            sender = Sender(Client(http, {}), seed=40, on_record=seen.append)
            await sender(2, entry, 5.0)
        assert seen == sender.records
        return bodies, seen

    async def test_completes_a_text(self) -> None:
        [(path, body)], [record] = await self.run(Entry("x", prompt="p", options={"stop": ["."]}))
        assert path == "/v1/completions"
        assert (body["prompt"], body["stop"], body["seed"]) == ("p", ["."], 42)
        assert record.started == 5.0

    async def test_holds_a_conversation(self) -> None:
        user = {"role": "user", "content": "one"}
        entry = Entry("mt", messages=(user,), later_turns=("two", "three"))
        bodies, records = await self.run(entry)
        assert [path for path, _ in bodies] == ["/v1/chat/completions"] * 3
        assert [body["messages"] for _, body in bodies][2] == [
            user,
            {"role": "assistant", "content": "answer 0"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "answer 1"},
            {"role": "user", "content": "three"},
        ]
        assert records[0].started == 5.0
        assert records[1].started >= records[0].ended

    async def test_ends_a_conversation_that_failed(self) -> None:
        entry = Entry("mt", messages=({"role": "user", "content": "one"},), later_turns=("two",))
        bodies, [record] = await self.run(entry, fail_at=0)
        assert len(bodies) == 1
        assert record.error == "HTTP 500"
