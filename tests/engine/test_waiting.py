"""The waiting queue: urgent first, fair between clients, in order within one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.sequence import TokenSequence
from engine.scheduling.waiting import OUTPUT_WEIGHT, WaitingQueue
from tests.engine.helpers import make_request

CLIENTS = ("ann", "ben", "cat")


def sequence(
    client: str = "",
    priority: int = 0,
    num_prompt: int = 1,
    *,
    arrival: float = 0.0,
    queue_timeout: float | None = None,
) -> TokenSequence:
    request = make_request([1] * num_prompt)
    request = replace(request, client=client, priority=priority, queue_timeout=queue_timeout)
    return TokenSequence(request, arrival)


def drain(queue: WaitingQueue) -> list[TokenSequence]:
    return [queue.pop() for _ in range(len(queue))]


def queue_of(*sequences: TokenSequence) -> WaitingQueue:
    queue = WaitingQueue()
    for waiting in sequences:
        queue.add(waiting)
    return queue


def test_one_client_is_served_in_order() -> None:
    sequences = [sequence() for _ in range(5)]
    assert drain(queue_of(*sequences)) == sequences


def test_lower_priority_goes_first() -> None:
    sequences = [sequence(priority=priority) for priority in (3, -1, 0, 3, -1)]
    assert drain(queue_of(*sequences)) == [sequences[i] for i in (1, 4, 2, 0, 3)]


def test_clients_take_turns_however_many_requests_they_have() -> None:
    many = [sequence("many") for _ in range(6)]
    few = [sequence("few") for _ in range(2)]
    assert drain(queue_of(*many, *few)) == [many[0], few[0], many[1], few[1], *many[2:]]


def test_turns_are_by_tokens_not_by_requests() -> None:
    long = [sequence("long", num_prompt=30) for _ in range(2)]
    short = [sequence("short", num_prompt=10) for _ in range(5)]
    order = drain(queue_of(*long, *short))
    assert order == [long[0], *short[:3], long[1], *short[3:]]


def test_output_counts_too() -> None:
    first, second, other = sequence("a"), sequence("a"), sequence("b", num_prompt=20)
    queue = queue_of(first, second, other)
    assert queue.pop() is first
    queue.note_output(first, 30 // OUTPUT_WEIGHT)
    assert drain(queue) == [other, second]


def test_a_client_that_was_away_gets_no_credit() -> None:
    queue = queue_of(*[sequence("busy", num_prompt=10) for _ in range(20)])
    for _ in range(10):
        queue.pop()
    back = [sequence("back", num_prompt=10) for _ in range(4)]
    for waiting in back:
        queue.add(waiting)
    order = [s.request.client for s in drain(queue)]
    assert sorted(order[:4]) == ["back", "back", "busy", "busy"]


def test_a_client_can_not_shed_its_debt_by_leaving() -> None:
    queue = queue_of(*[sequence("steady") for _ in range(9)])
    greedy = sequence("greedy", num_prompt=5)
    queue.add(greedy)
    while queue.pop() is not greedy:
        pass
    queue.note_end(greedy)
    again = sequence("greedy")
    queue.add(again)
    order = drain(queue)
    assert order.index(again) >= 3


def test_preempted_sequences_go_before_new_ones_of_their_priority() -> None:
    old, young, new = sequence("a"), sequence("a"), sequence("b")
    urgent = sequence("b", priority=-1)
    queue = queue_of(old, young)
    assert drain(queue) == [old, young]
    queue.add(new)
    queue.put_back(young)
    queue.put_back(old)
    queue.add(urgent)
    assert drain(queue) == [urgent, old, young, new]


def test_ended_sequences_leave() -> None:
    a, b = sequence("a"), sequence("b")
    queue = queue_of(a, b)
    queue.discard(a)
    assert drain(queue) == [b]
    queue.put_back(b)
    queue.discard(b)
    assert not queue
    with pytest.raises(IndexError):
        queue.peek()


def test_overdue_sequences_are_told_once_and_only_while_they_wait() -> None:
    patient = sequence()
    late = sequence(arrival=1.0, queue_timeout=2.0)
    started = sequence(arrival=1.0, queue_timeout=1.0, priority=-1)
    queue = queue_of(patient, late, started)
    assert queue.pop() is started
    assert queue.overdue(3.0) == []
    queue.put_back(started)  # it has begun to answer: the deadline is met
    assert queue.overdue(3.5) == [late.request_id]
    assert queue.overdue(100.0) == []


@given(
    costs=st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(1, 50)), min_size=1, max_size=60)
)
@settings(max_examples=200, deadline=None)
def test_clients_with_waiting_requests_differ_by_one_request_at_most(
    costs: list[tuple[str, int]],
) -> None:
    """The bound of fair queueing: while two clients both wait, neither gets far ahead."""
    queue = queue_of(*[sequence(client, num_prompt=cost) for client, cost in costs])
    left = {client: [cost for name, cost in costs if name == client] for client in CLIENTS}
    served = dict.fromkeys(CLIENTS, 0)
    largest = max(cost for _, cost in costs)
    while queue:
        popped = queue.pop()
        client = popped.request.client
        assert popped.num_prompt == left[client].pop(0)
        served[client] += popped.num_prompt
        waiting = [served[name] for name in CLIENTS if left[name]]
        if waiting:
            assert max(waiting) - min(waiting) <= largest


class WaitingMachine(RuleBasedStateMachine):
    """Random arrivals, admissions, outputs, preemptions and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.new: list[TokenSequence] = []
        self.preempted: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self.clock = itertools.count()

    @rule(client=st.sampled_from(CLIENTS), priority=st.integers(0, 1), prompt=st.integers(1, 9))
    def arrive(self, client: str, priority: int, prompt: int) -> None:
        waiting = sequence(client, priority, prompt, arrival=float(next(self.clock)))
        self.queue.add(waiting)
        self.new.append(waiting)

    @precondition(lambda self: self.new or self.preempted)
    @rule()
    def admit(self) -> None:
        popped = self.queue.pop()
        waiting = self.new + self.preempted
        assert popped.request.priority == min(s.request.priority for s in waiting)
        peers = [s for s in waiting if s.request.priority == popped.request.priority]
        if any(s in self.preempted for s in peers):
            assert popped in self.preempted
            self.preempted.remove(popped)
        else:
            own = [s for s in peers if s.request.client == popped.request.client]
            assert popped is own[0]
            self.new.remove(popped)
        self.running.append(popped)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(0, 5))
    def answer(self, data: st.DataObject, num_tokens: int) -> None:
        self.queue.note_output(data.draw(st.sampled_from(self.running)), num_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempt=st.booleans())
    def stop_running(self, data: st.DataObject, preempt: bool) -> None:
        stopped = data.draw(st.sampled_from(self.running))
        self.running.remove(stopped)
        if preempt:
            self.queue.put_back(stopped)
            self.preempted.append(stopped)
        else:
            self.queue.note_end(stopped)

    @precondition(lambda self: self.new or self.preempted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        aborted = data.draw(st.sampled_from(self.new + self.preempted))
        self.queue.discard(aborted)
        (self.new if aborted in self.new else self.preempted).remove(aborted)

    @invariant()
    def it_holds_who_waits(self) -> None:
        waiting = {s.request_id for s in self.new + self.preempted}
        assert {s.request_id for s in self.queue} == waiting
        assert len(self.queue) == len(waiting)

    def teardown(self) -> None:
        for running in self.running:
            self.queue.note_end(running)
        for popped in drain(self.queue):
            self.queue.note_end(popped)
        # Nothing is remembered of clients that are gone: a new one starts level with the others.
        a, b = sequence("ann", num_prompt=3), sequence("ben")
        self.queue.add(a)
        self.queue.add(b)
        assert drain(self.queue) == [a, b]


TestWaitingMachine = WaitingMachine.TestCase
TestWaitingMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_client_starves_whatever_the_others_send(data: st.DataObject) -> None:
    """A client's request is served before the others together got more than a fixed amount."""
    victim = sequence("victim", num_prompt=data.draw(st.integers(1, 20)))
    queue = queue_of(*[sequence("flood", num_prompt=data.draw(st.integers(1, 20)))])
    queue.add(victim)
    served = 0
    while (popped := queue.pop()) is not victim:
        output = data.draw(st.integers(0, 5))
        queue.note_output(popped, output)
        served += popped.num_prompt + OUTPUT_WEIGHT * output
        for client in ("flood", "flood2"):
            queue.add(sequence(client, num_prompt=data.draw(st.integers(1, 20))))
        assert served <= 2 * (20 + 5 * OUTPUT_WEIGHT)
