"""WaitingQueue: the order in which requests get their turn: urgency, then fairness, then arrival.

Fairness is that of the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024): every client has a counter of the tokens it was served, and the client with
the lowest goes next. A client that was away gets no credit for that time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.scheduling.sequence import TokenSequence

OUTPUT_WEIGHT = 2
"""Of an output token against a prompt token's 1, about as their costs are."""


class ServiceCounters:
    """Tokens that each client was served, output tokens weighted."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_present: Counter[str] = Counter()

    def __getitem__(self, client: str) -> int:
        return self._served[client]

    def enter(self, client: str) -> None:
        """Note one more request of a client, waiting or running."""
        if not self._num_present[client]:
            floor = min((self._served[other] for other in self._num_present), default=0)
            self._served[client] = max(self._served.get(client, 0), floor)
        self._num_present[client] += 1

    def leave(self, client: str) -> None:
        """Note that a request of a client has ended."""
        self._num_present[client] -= 1
        if not self._num_present[client]:
            del self._num_present[client]
        if not self._num_present:
            self._served.clear()

    def charge(self, client: str, num_tokens: int) -> None:
        self._served[client] += num_tokens


@dataclass(slots=True)
class _PriorityClass:
    """Waiting sequences of one priority."""

    preempted: deque[TokenSequence] = field(default_factory=deque)
    by_client: dict[str, deque[TokenSequence]] = field(default_factory=dict)
    """Never an empty deque."""

    def __bool__(self) -> bool:
        return bool(self.preempted or self.by_client)


class WaitingQueue:
    """Sequences that wait, the most due first.

    A lower `priority` goes first, whatever else. Within a priority, sequences that were preempted
    go before new ones; those are taken from the client that was served least, and of one client in
    the order in which they came.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _PriorityClass] = {}
        self._counters = ServiceCounters()
        self._size = 0
        self._numbers = itertools.count()
        self._arrivals: dict[str, int] = {}
        """Number of each new waiting sequence, in the order they came, by request id."""
        self._deadlines: list[tuple[float, str]] = []
        """A heap; of sequences that may have left since."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[TokenSequence]:
        """In no particular order."""
        for waiting in self._classes.values():
            yield from waiting.preempted
            for line in waiting.by_client.values():
                yield from line

    def add(self, sequence: TokenSequence) -> None:
        """A new sequence."""
        request = sequence.request
        waiting = self._classes.setdefault(request.priority, _PriorityClass())
        waiting.by_client.setdefault(request.client, deque()).append(sequence)
        self._counters.enter(request.client)
        self._arrivals[request.request_id] = next(self._numbers)
        self._size += 1
        if request.queue_timeout is not None and sequence.first_scheduled_time is None:
            deadline = sequence.arrival_time + request.queue_timeout
            heapq.heappush(self._deadlines, (deadline, request.request_id))

    def put_back(self, sequence: TokenSequence) -> None:
        """A sequence that was preempted; it goes before those that were preempted earlier."""
        waiting = self._classes.setdefault(sequence.request.priority, _PriorityClass())
        waiting.preempted.appendleft(sequence)
        self._size += 1

    def peek(self) -> TokenSequence:
        """The next sequence. Raises IndexError when none waits."""
        if not self._size:
            raise IndexError("no sequence waits")
        waiting = self._classes[min(self._classes)]
        if waiting.preempted:
            return waiting.preempted[0]
        return min((line[0] for line in waiting.by_client.values()), key=self._due)

    def pop(self) -> TokenSequence:
        """Take the next sequence out, to run it. Raises IndexError when none waits."""
        sequence = self.peek()
        if sequence.request_id in self._arrivals:
            self._counters.charge(sequence.request.client, sequence.num_tokens)
        self._take(sequence)
        return sequence

    def discard(self, sequence: TokenSequence) -> None:
        """Take a waiting sequence out that has ended. Raises ValueError when it does not wait."""
        self._take(sequence)
        self.note_end(sequence)

    def note_output(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Charge a running sequence's client for output."""
        self._counters.charge(sequence.request.client, OUTPUT_WEIGHT * num_tokens)

    def note_end(self, sequence: TokenSequence) -> None:
        """A sequence that was popped has ended."""
        self._counters.leave(sequence.request.client)

    def overdue(self, now: float) -> list[str]:
        """Ids of new sequences that have waited longer than they may, each told once."""
        found = []
        while self._deadlines and self._deadlines[0][0] < now:
            _, request_id = heapq.heappop(self._deadlines)
            if request_id in self._arrivals:
                found.append(request_id)
        return found

    def _due(self, sequence: TokenSequence) -> tuple[int, int]:
        request = sequence.request
        return self._counters[request.client], self._arrivals[request.request_id]

    def _take(self, sequence: TokenSequence) -> None:
        request = sequence.request
        waiting = self._classes[request.priority]
        if self._arrivals.pop(request.request_id, None) is None:
            waiting.preempted.remove(sequence)
        else:
            line = waiting.by_client[request.client]
            line.remove(sequence)
            if not line:
                del waiting.by_client[request.client]
        if not waiting:
            del self._classes[request.priority]
        self._size -= 1
