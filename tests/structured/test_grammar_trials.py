"""Grammars on trial in processes: what becomes of slow ones, and of the processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.request import GrammarSpec, RequestError
from engine.sampling.grammar_trials import GrammarProcessError, GrammarTrials
from tests.structured.engines import grammars, json_schema
from tests.structured.schemas import SCHEMAS
from tests.structured.test_grammars import BROKEN, OBJECT

ROOT = Path(__file__).parent.parent.parent
SLOW = GrammarSpec("choice", json.dumps([f"choice number {i} of all these" for i in range(1800)]))
"""Takes some 50 ms."""
NO_TIME = 0.002


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials()
    yield trials
    trials.close()


def check(trials: GrammarTrials, spec: GrammarSpec, seconds: float = 20.0) -> None:
    trials.check(spec, grammars().token_table, seconds)


def process_of(trials: GrammarTrials) -> int:
    (process,) = trials.process_ids
    return process


def exists(process: int) -> bool:
    """Also as a zombie."""
    return Path(f"/proc/{process}").exists()


def test_the_verdict_is_that_of_this_process(trials: GrammarTrials) -> None:
    for spec in [*BROKEN.values(), *map(json_schema, SCHEMAS.values()), OBJECT]:
        reasons = []
        for compile_ in (lambda spec: check(trials, spec), grammars().compile):
            try:
                compile_(spec)
                reasons.append("")
            except RequestError as error:
                reasons.append(str(error))
        assert reasons[0] == reasons[1], spec
    assert len(trials.process_ids) == 1, "one process has done it all"


def test_a_grammar_that_takes_too_long_is_ended_and_the_next_one_works(
    trials: GrammarTrials,
) -> None:
    check(trials, OBJECT)
    first = process_of(trials)
    with pytest.raises(RequestError, match=r"takes longer than 0\.002 s to compile") as raised:
        check(trials, SLOW, NO_TIME)
    assert raised.value.param == "grammar"
    assert not exists(first)
    assert trials.process_ids == []
    check(trials, SLOW)
    assert process_of(trials) != first


def test_a_grammar_that_never_ends_is_ended(trials: GrammarTrials) -> None:
    check(trials, OBJECT)
    first = process_of(trials)
    os.kill(first, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"takes longer than 0\.2 s"):
        check(trials, SLOW, 0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert not exists(first)
    check(trials, SLOW)


def test_a_process_that_dies_over_a_grammar_refuses_it(trials: GrammarTrials) -> None:
    check(trials, OBJECT)
    first = process_of(trials)
    os.kill(first, signal.SIGSTOP)
    killing = threading.Timer(0.2, os.kill, (first, signal.SIGKILL))
    killing.start()
    with pytest.raises(RequestError, match="compiling it takes too much memory or fails"):
        check(trials, SLOW)
    killing.join()
    assert not exists(first)
    check(trials, SLOW)


def test_a_process_that_died_in_silence_is_nobodys_fault(trials: GrammarTrials) -> None:
    check(trials, OBJECT)
    first = process_of(trials)
    os.kill(first, signal.SIGKILL)
    while Path(f"/proc/{first}/stat").read_text().split()[2] != "Z":
        time.sleep(0.005)
    check(trials, OBJECT)
    assert process_of(trials) != first
    assert not exists(first)


def test_closing_ends_processes_at_rest_and_at_work(trials: GrammarTrials) -> None:
    check(trials, OBJECT)
    at_work = process_of(trials)
    os.kill(at_work, signal.SIGSTOP)
    refused: list[BaseException] = []

    def work() -> None:
        try:
            check(trials, SLOW)
        except GrammarProcessError as error:
            refused.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not trials._busy:
        time.sleep(0.005)
    check(trials, OBJECT)
    (at_rest,) = set(trials.process_ids) - {at_work}
    trials.close()
    thread.join(5)
    assert refused
    assert not exists(at_work)
    assert not exists(at_rest)
    with pytest.raises(GrammarProcessError):
        check(trials, OBJECT)
    trials.close()


def test_a_process_that_does_not_start_is_an_error(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    for executable, message in (("/nowhere", "can be started"), ("/bin/false", "does not start")):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(GrammarProcessError, match=message):
            check(trials, OBJECT)
        assert trials.process_ids == []


ABANDON = """
import os
from engine.sampling.grammar_tokens import TokenTable
from engine.sampling.grammar_trials import GrammarTrials
trials = GrammarTrials()
pieces = tuple(bytes([i]) for i in range(256)) + (b"<end>",)
trials.warm_up(lambda: TokenTable(pieces, frozenset({256}), frozenset({256}), 257))
print(*trials.process_ids, flush=True)
os._exit(1)
"""


def test_no_process_outlives_its_server() -> None:
    command = [sys.executable, "-c", ABANDON]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    process = int(ended.stdout)
    deadline = time.monotonic() + 10
    while exists(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run_in_child(code: str) -> str:
    command = [sys.executable, "-c", f"import engine.sampling.grammar_process as it\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def test_the_process_is_small_and_its_memory_bounded() -> None:
    heavy = run_in_child("import sys\nprint({'torch', 'transformers'} & set(sys.modules))")
    assert heavy == "set()"
    too_much = (
        "it._limit_memory()\ntry:\n    bytearray(it.MAX_BYTES)\nexcept MemoryError:\n    print(1)"
    )
    assert run_in_child(too_much) == "1"
