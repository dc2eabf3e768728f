"""Progress of a load: what the engine reports, and how it is shown."""

from __future__ import annotations

import io
import json
import logging
import time

import pytest
from rich.console import Console

from engine.models.decoder_spec import decoder_spec
from engine.models.gguf import hf_folder
from engine.models.library_bars import BarReader, downloads_told_to
from engine.models.packing import packed_weights
from engine.models.source import resolve
from engine.progress import Progress, Reporter, listening, reporting
from server.observability import load_progress
from server.observability.load_progress import _bars, _lines, showing_progress
from tests.models.tiny_gguf import write_tiny_gguf


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def heard():
    found: list[Progress] = []
    with listening(found.append):
        yield found


def test_a_phase_ends_also_when_it_fails(heard):
    try:
        with reporting("packing", "m", 10, "bytes") as progress:
            progress.advance(4)
            raise RuntimeError
    except RuntimeError:
        pass
    assert [(state.done, state.ended) for state in heard] == [(0, False), (4, False), (4, True)]


def test_nobody_has_to_listen():
    with reporting("packing", "m", 10) as progress:
        progress.advance(10)


def test_conversion_and_packing_of_a_model_are_reported(heard, monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    files = resolve(str(tmp_path / "tiny.gguf"))
    spec = decoder_spec(json.loads((hf_folder(files) / "config.json").read_text()))
    packed_weights(files, spec, "auto", 1)
    ends = {state.phase: state for state in heard if state.ended}
    assert list(ends) == ["reading", "converting", "packing"]
    assert ends["packing"].done == ends["packing"].total > 0
    assert ends["packing"].subject == files.name


def test_the_hubs_bars_are_told(heard):
    reporter = Reporter(Progress("downloading", "m", "bytes", None), heard.append)
    bars = downloads_told_to(reporter)
    files = bars(desc="Fetching 3 files", total=3, name="hub")
    transfer = bars(desc="Downloading bytes", unit="B", total=0)
    whole = bars(desc="Reconstructing", unit="B", total=0)
    whole.total += 1000
    for bar in (files, transfer, whole):
        bar.update(1)
        bar.refresh()
    whole.update(599)
    whole.refresh()
    assert {state.total for state in heard} == {None, 1000}
    assert heard[-1].done == 600


def test_a_bar_on_stderr_is_read(heard):
    reporter = Reporter(Progress("unpacking", "m", "steps", None), heard.append)
    BarReader(reporter).write("\rUnpacking:  45%|####5     | 130/290 [00:01<00:01, 99.1it/s]")
    assert (heard[-1].done, heard[-1].total) == (130, 290)


def test_lines_tell_what_is_left(caplog):
    caplog.set_level(logging.INFO)
    with _lines(0.02) as listener, listening(listener):
        with reporting("packing", "m", 100, "bytes") as progress:
            progress.advance(25)
            wait_until(lambda: caplog.records)
        with reporting("converting", "m"):
            seen = len(caplog.records)
            wait_until(lambda: len(caplog.records) > seen)
    first, last = caplog.records[0], caplog.records[-1]
    assert first.message.startswith("packing m: 25%, about ")
    assert first.fields["seconds_left"] == pytest.approx(3 * first.fields["seconds"], abs=0.3)
    assert last.message == "converting m: 0 s so far"


def test_bars_leave_nothing_behind_and_let_the_log_through(monkeypatch):
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100)
    with (
        _bars(console) as listener,
        listening(listener),
        reporting("packing", "m", 100, "bytes") as progress,
    ):
        progress.advance(50)
        logging.getLogger("x").warning("a line of the log")
        wait_until(lambda: "50%" in terminal.getvalue())
    shown = terminal.getvalue()
    assert "packing m" in shown
    assert "a line of the log" in shown
    assert handler.stream is written


def test_json_logs_have_lines_also_on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(load_progress, "_bars", lambda console: pytest.fail("bars in JSON logs"))
    with showing_progress("json"), reporting("packing", "m"):
        pass
