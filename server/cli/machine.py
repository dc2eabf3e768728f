"""The part of `slipstream doctor` that needs no model: what this machine is good for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from engine.config import Config
from server.cli.command import CommandError

if TYPE_CHECKING:
    from engine.doctor.machine import Machine
    from engine.doctor.machine_advice import Expectation, Findings

STDOUT = Path("-")
_GIB = 1 << 30


def examine_and_print(config: Config, json_file: Path | None, console: Console) -> None:
    """
    Raises:
        CommandError: the machine has a fault; printed before, with everything else.
    """
    from engine.doctor.machine import examine_machine
    from engine.doctor.machine_advice import judge

    with console.status("examining ...") as status:
        machine = examine_machine(config.threads, lambda what: status.update(f"examining {what}"))
    findings = judge(machine)
    console.print(_facts(machine))
    console.print(_expectations(findings.expectations))
    for sentence in findings.faults:
        console.print(f"[red]✗[/] {sentence}", highlight=False, soft_wrap=True)
    for sentence in findings.advice:
        console.print(f"• {sentence}", highlight=False, soft_wrap=True)
    if not findings.faults and not findings.advice:
        console.print("Nothing to change.")
    if json_file is not None:
        write_json(_as_json(machine, findings), json_file)
    if findings.faults:
        raise CommandError(f"{len(findings.faults)} faults of this machine")


def write_json(figures: Mapping[str, Any], file: Path) -> None:
    """To a file, or to stdout."""
    text = json.dumps(figures, indent=1, default=str)
    if file == STDOUT:
        print(text)
    else:
        file.write_text(text, encoding="utf-8")


def _as_json(machine: Machine, findings: Findings) -> dict[str, Any]:
    return {"machine": asdict(machine), **asdict(findings)}


def _facts(machine: Machine) -> Table:
    table = Table(show_header=False)
    for name, value in _rows(machine):
        table.add_row(name, value)
    return table


def _rows(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "CPU", machine.cpu
    physical = machine.usable_physical_cores
    cores = f"{machine.usable_cores} of {machine.logical_cores}"
    cores += "" if physical is None else f", on {physical} physical ones"
    limit = machine.cgroup_cores
    yield "cores", cores + ("" if limit is None else f"; the container may use {limit:g}")
    yield "threads", str(machine.threads)
    yield "instructions", ", ".join(machine.features) or "none that there are kernels for"
    yield "kernels", machine.kernels or f"torch: {machine.kernels_missing}"
    for threads, speed in machine.read_gb_per_s.items():
        yield f"memory read by {threads}", f"{speed:.1f} GB/s"
    yield "memory", f"{_gib(machine.free_memory_bytes)} of {_gib(machine.memory_bytes)} free"
    if machine.cgroup_memory_bytes is not None:
        yield "container's memory", _gib(machine.cgroup_memory_bytes)
    yield "swap", f"{_gib(machine.swap_used_bytes)} of {_gib(machine.swap_bytes)} used"
    yield "huge pages", machine.huge_pages or "unknown"
    for gpu in machine.gpus:
        yield "GPU", f"{gpu.name}, {_gib(gpu.memory_bytes)}"
    if not machine.gpus:
        yield "GPU", "none that PyTorch can use"
    yield "cache", f"{machine.cache}, {_gib(machine.cache_free_bytes)} free on its disk"
    yield "versions", ", ".join(f"{name} {value}" for name, value in machine.versions.items())


def _expectations(expectations: tuple[Expectation, ...]) -> Table:
    title = "At most, one request, plain decoding, 4-bit weights"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("parameters", "weights", "tokens/s", ""):
        table.add_column(heading, justify="right")
    for entry in expectations:
        speed = "?" if entry.tokens_per_s is None else f"{entry.tokens_per_s:.0f}"
        note = "" if entry.fits else "does not fit the free memory"
        table.add_row(f"{entry.parameters / 1e9:g}B", _gib(entry.weight_bytes), speed, note)
    return table


def _gib(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / _GIB:.1f} GiB"
