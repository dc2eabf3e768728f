"""The table of faults, filled by the tests that make them: `pytest tests/e2e --fault-table`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

NOTE = "fault"
Note = Callable[[str, str, float | None], None]
"""Takes the fault, what the client sees of it, and the seconds until all was well again; None:
there was nothing to recover from."""


def render(rows: Iterable[tuple[str, str, float | None]]) -> str:
    """A Markdown table; of a fault that was tried in several ways the slowest recovery counts."""
    slowest: dict[tuple[str, str], float | None] = {}
    for fault, seen, seconds in rows:
        before = slowest.get((fault, seen))
        slowest[fault, seen] = seconds if before is None else max(before, seconds or 0.0)
    lines = ["| fault | what the client sees | recovered in |", "| --- | --- | --- |"]
    for (fault, seen), seconds in slowest.items():
        lines.append(f"| {fault} | {seen} | {'-' if seconds is None else f'{seconds:.2f} s'} |")
    return "\n".join(lines)
