"""The doctor's look at the machine: what it reads, what it makes of that, how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.doctor.machine import Machine, examine_machine
from engine.doctor.machine_advice import judge
from server.cli.main import main

GIB = 1 << 30


@pytest.fixture
def machine() -> Machine:
    """One that nothing is wrong with."""
    return Machine(
        cpu="CPU",
        logical_cores=8,
        usable_cores=4,
        usable_physical_cores=4,
        cgroup_cores=None,
        threads=4,
        features=("AVX2",),
        kernels="avx2",
        kernels_missing=None,
        read_gb_per_s={1: 10.0, 4: 23.0},
        memory_bytes=16 * GIB,
        free_memory_bytes=8 * GIB,
        cgroup_memory_bytes=None,
        swap_bytes=0,
        swap_used_bytes=0,
        huge_pages="madvise",
        gpus=(),
        cache=Path("cache"),
        cache_writable=True,
        cache_free_bytes=50 * GIB,
        versions={},
    )


def test_speed_is_bandwidth_by_bytes(machine: Machine) -> None:
    findings = judge(machine)
    [eight] = [entry for entry in findings.expectations if entry.parameters == 8e9]
    assert eight.tokens_per_s == pytest.approx(23 / 4.6)
    assert eight.fits
    assert not findings.expectations[-1].fits
    assert findings.faults == findings.advice == ()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kernels": None, "kernels_missing": "not built", "read_gb_per_s": {}}, "not built"),
        ({"cache_writable": False}, "can't be written"),
        ({"cache_free_bytes": GIB}, "Only 1.0 GiB are free"),
        ({"free_memory_bytes": GIB // 2}, "Only 0.5 GiB of memory"),
    ],
    ids=["kernels", "read-only", "disk", "memory"],
)
def test_faults(machine: Machine, changes: dict[str, object], fault: str) -> None:
    [found] = judge(replace(machine, **changes)).faults
    assert fault in found


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"cgroup_cores": 2.5}, "--threads 2"),
        ({"threads": 6}, "wait for each other: --threads 4"),
        ({"usable_physical_cores": 2}, "try --threads 2"),
        ({"threads": 1}, "only 1 threads are set"),
        ({"kernels": "scalar"}, "slowly"),
        ({"swap_used_bytes": GIB}, "1.0 GiB are swapped out"),
        ({"huge_pages": "never"}, "huge pages are off"),
    ],
    ids=["quota", "oversubscribed", "siblings", "idle", "scalar", "swap", "pages"],
)
def test_advice(machine: Machine, changes: dict[str, object], advice: str) -> None:
    findings = judge(replace(machine, **changes))
    assert findings.faults == ()
    [found] = findings.advice
    assert advice in found


def test_what_the_system_tells_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "not" / "there"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 5})
    monkeypatch.setattr(
        "engine.doctor.machine._bandwidths", lambda counts: dict.fromkeys(counts, 1.0)
    )
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    proc.mkdir()
    flags = "flags\t\t: avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni"
    (proc / "cpuinfo").write_text(f"model name\t: Some CPU\n{flags}\n")
    (proc / "meminfo").write_text(
        "MemTotal:  8192 kB\nMemAvailable:  4096 kB\nSwapTotal:  1024 kB\nSwapFree:  1000 kB\n"
    )
    group = sys / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "memory.max").write_text("2097152\n")
    (group / "memory.current").write_text("1048576\n")
    for number, core in ((0, 0), (1, 0), (5, 3)):
        folder = sys / "devices" / "system" / "cpu" / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{core}\n")
    pages = sys / "kernel" / "mm" / "transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("always madvise [never]\n")
    found = examine_machine(None, lambda what: None, proc=proc, sys=sys)
    assert found.cpu == "Some CPU"
    assert found.features == ("AVX2", "AVX-512", "AVX-512 VNNI")
    assert (found.usable_cores, found.usable_physical_cores, found.cgroup_cores) == (3, 2, 1.5)
    assert found.threads == 3
    assert (found.memory_bytes, found.free_memory_bytes) == (8 << 20, 1 << 20)
    assert (found.cgroup_memory_bytes, found.swap_used_bytes) == (2 << 20, 24 << 10)
    assert found.huge_pages == "never"
    assert found.cache_free_bytes > 0
    assert set(found.read_gb_per_s) == {1, 3}


def test_a_fault_is_the_exit_code_and_json_is_all_there_is_on_stdout(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = replace(machine, cache_writable=False)
    for found, code in ((machine, 0), (broken, 1)):
        monkeypatch.setattr("engine.doctor.machine.examine_machine", lambda *_, found=found: found)
        assert main(["doctor", "--json"]) == code
        written = capsys.readouterr()
        figures = json.loads(written.out)
        assert figures["machine"]["read_gb_per_s"] == {"1": 10.0, "4": 23.0}
        assert len(figures["faults"]) == code
        assert len(figures["expectations"]) == 7
    assert written.err == "slipstream: error: 1 faults of this machine\n"


def test_a_plot_needs_a_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plot", "x.png"]) == 1
    assert capsys.readouterr().err.startswith("slipstream: error: --plot needs a draft model")


def test_the_machine_is_told_in_words(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.doctor.machine.examine_machine", lambda *_: machine)
    assert main(["doctor"]) == 0
    written = capsys.readouterr().out
    assert "23.0 GB/s" in written
    assert "Nothing to change." in written
