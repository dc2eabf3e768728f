"""Counts of HTTP requests, for the metrics."""

from __future__ import annotations

from collections import Counter


class HttpCounts:
    """Requests answered and in progress. Used by one event loop."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, str, str]] = Counter()
        """By method, route and status."""
        self.in_progress = 0
