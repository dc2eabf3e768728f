"""The soak and the overload test in short, against a real server process on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.__main__ import main
from loadtest.client import Record
from loadtest.overload import Overload, Phase, overload, percentile
from loadtest.overload import show as show_overload
from loadtest.server_state import ServerState
from loadtest.soak import Soak, Tally, show, soak
from tests.e2e.served import Served, served, tiny_flags


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tiny_draft_dir: Path) -> Iterator[Served]:
    flags = tiny_flags(tiny_model_dir, tiny_draft_dir)
    flags += ["--scheduler.max-running", "4", "--scheduler.max-waiting", "24"]
    with served(*flags) as server:
        server.wait_until_ready()
        yield server


@pytest.mark.slow
async def test_short_soak(server: Served) -> None:
    result = await soak(
        server.url, seconds=6, warm_up_seconds=4, clients=16, long_tokens=120, seed=1
    )
    show(result, Console())
    assert result.tally.faults == []
    assert set(result.tally.sent) == {
        "short", "long", "stream", "cancelled", "malformed", "structured", "seeded",
    }  # fmt: skip
    assert min(result.tally.sent.values()) > 3
    assert result.leaks == []
    assert result.passed


@pytest.mark.slow
async def test_short_overload(server: Served) -> None:
    result = await overload(server.url, concurrency=4, seconds=2, max_tokens=48)
    show_overload(result, Console())
    assert result.overloaded.num_refused > 0, "40 users do not fit 28 places"
    assert result.normal.num_refused == 0
    assert not result.normal.failures + result.overloaded.failures
    assert len(result.overloaded.accepted) > 4
    assert result.memory_growth < 0.02


STATE = ServerState(0, 0, 0.0, 7, 20, 10**9)


@pytest.mark.parametrize(
    ("after", "leak"),
    [
        (replace(STATE, tasks=8), "tasks: 7 -> 8"),
        (replace(STATE, descriptors=21), "descriptors: 20 -> 21"),
        (replace(STATE, resident_bytes=1_030_000_000), "memory: +3.0%"),
    ],
)
def test_leaks_are_told(after: ServerState, leak: str) -> None:
    result = Soak(60, Tally(), STATE, after)
    assert result.leaks == [leak]
    assert not result.passed


def test_soak_without_requests_has_not_passed() -> None:
    tally = Tally()
    assert not Soak(60, tally, STATE, STATE).passed
    tally.sent["short"] += 1
    assert Soak(60, tally, STATE, STATE).passed
    tally.faults.append("short: HTTP 500")
    assert not Soak(60, tally, STATE, STATE).passed


def record(tpot: float, error: str | None = None) -> Record:
    times = () if error else (1.0, 1.0 + 10 * tpot)
    return Record("overload", 0.0, 9.0, times, completion_tokens=11, error=error)


def test_overload_compares_time_per_token() -> None:
    normal = Phase(4, 10.0, tuple(record(0.010) for _ in range(8)), 10**9)
    slow = Phase(40, 10.0, (*(record(0.016) for _ in range(8)), record(0, "HTTP 429: x")), 10**9)
    result = Overload(normal, slow)
    assert result.slowdowns == pytest.approx({"median": 1.6, "95%": 1.6})
    assert slow.num_refused == 1
    assert len(result.problems) == 2
    assert Overload(normal, normal).problems == []
    failed = replace(normal, records=(*normal.records, record(0, "HTTP 500: x")))
    assert Overload(normal, failed).problems == ["1 requests failed: HTTP 500: x"]
    assert Overload(normal, replace(normal, peak_bytes=11 * 10**8)).problems == ["memory: +10.0%"]
    assert Overload(normal, replace(normal, records=())).problems == ["too few answers to compare"]


def test_percentile_is_a_value_that_was_there() -> None:
    assert percentile([5.0], 95) == 5.0
    assert percentile([float(i) for i in range(1, 101)], 95) == 95.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0


@pytest.mark.parametrize("test", ["soak", "overload --concurrency 4"])
def test_server_that_is_not_there_is_told(test: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*test.split(), "--base-url", "http://127.0.0.1:9"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"loadtest {test.split()[0]}: error: http://127.0.0.1:9")
    assert len(error.splitlines()) == 1
