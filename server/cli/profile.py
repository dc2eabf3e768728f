"""`slipstream bench --profile`: where forward passes spend their time."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from server.cli.command import CommandError

if TYPE_CHECKING:
    from engine.build import EngineParts
    from engine.profile import PassProfile


def print_profiles(parts: EngineParts, console: Console) -> dict[str, Any]:
    """Profile the target and every draft model that run natively, one table a number of rows.

    Raises:
        CommandError: none does.
    """
    from engine.profile import profile_models

    profiles: list[PassProfile] = []
    for profile in profile_models(parts):
        console.print(_table(profile))
        profiles.append(profile)
    if not profiles:
        raise CommandError("--profile: no model runs on the native decoder")
    return {"profiles": [asdict(profile) for profile in profiles]}


def _table(profile: PassProfile) -> Table:
    total = sum(part.milliseconds for part in profile.parts)
    limit = sum(part.limit_ms for part in profile.parts)
    table = Table(
        title=f"{profile.model}, rows: {profile.rows}, memory reads "
        f"{profile.read_gigabytes_per_second:.1f} GB/s",
        title_justify="left",
    )
    for heading in ("part", "ms", "share", "MB", "memory ms", "arithmetic ms", "limit / time"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for part in profile.parts:
        times = (f"{part.weight_megabytes:.1f}", f"{part.memory_ms:.2f}")
        arithmetic = (f"{part.arithmetic_ms:.2f}", f"{part.limit_ms / part.milliseconds:.2f}")
        weighted = (*times, *arithmetic) if part.weight_megabytes else ("", "", "", "")
        table.add_row(
            part.part, f"{part.milliseconds:.2f}", f"{part.milliseconds / total:.0%}", *weighted
        )
    table.add_section()
    table.add_row("all", f"{total:.2f}", "", "", "", "", f"{limit / total:.2f}")
    return table
