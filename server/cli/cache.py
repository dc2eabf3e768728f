"""`slipstream cache`: lists what the cache holds and deletes what nobody uses."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from datetime import datetime

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from engine.cache.errors import CacheError
from engine.cache.location import DEFAULT_MAX_GIB, max_cache_gib, model_cache
from engine.cache.model_cache import Entry
from server.cli.command import CommandError, Run, Subcommand

_GIB = 1 << 30


def _configure(parser: argparse.ArgumentParser) -> Run:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    summary = "list what the cache holds, the least recently used first"
    actions.add_parser("ls", help=summary, description=summary).set_defaults(act=_list)
    summary = "delete what no process uses, the least recently used first"
    prune = actions.add_parser("prune", help=summary, description=summary)
    prune.set_defaults(act=_prune)
    bound = prune.add_mutually_exclusive_group()
    bound.add_argument(
        "--max-gib",
        type=_gib,
        metavar="X",
        help="until the rest is no larger; default: SLIPSTREAM_CACHE_MAX_GIB, or "
        f"{DEFAULT_MAX_GIB:g}",
    )
    bound.add_argument("--all", action="store_true", help="everything, digests too")

    def run(arguments: argparse.Namespace) -> None:
        try:
            arguments.act(arguments)
        except CacheError as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            raise CommandError(f"can't read the model cache: {error}") from error

    return run


COMMAND = Subcommand("cache", "list or delete what was fetched, converted and packed", _configure)


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of GiB, 0 or more (got {text!r})")
    return value


def _list(_: argparse.Namespace) -> None:
    cache = model_cache()
    entries = cache.entries()
    console = Console()
    if entries:
        console.print(_table(entries))
    console.print(
        f"{_size(entries)} of at most {max_cache_gib():g} GiB in {cache.root}",
        highlight=False,
        soft_wrap=True,
    )


def _table(entries: Sequence[Entry]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("kind", "model", "MiB", "last used", "in use"):
        table.add_column(heading, justify="right" if heading == "MiB" else "left", overflow="fold")
    for entry in entries:
        table.add_row(
            entry.kind,
            entry.label,
            f"{entry.num_bytes / (1 << 20):.1f}",
            f"{datetime.fromtimestamp(entry.used_at):%Y-%m-%d %H:%M}",
            "yes" if entry.in_use else "",
        )
    return table


def _prune(arguments: argparse.Namespace) -> None:
    cache = model_cache()
    gib = max_cache_gib() if arguments.max_gib is None else arguments.max_gib
    removed = cache.prune(0 if arguments.all else gib * _GIB)
    if arguments.all:
        cache.forget_digests()
    for entry in removed:
        print(f"deleted {entry.kind} {entry.label}")
    kept = cache.entries()
    in_use = [entry for entry in kept if entry.in_use]
    print(f"freed {_size(removed)}, kept {_size(kept)}, {len(in_use)} of {len(kept)} in use")


def _size(entries: Sequence[Entry]) -> str:
    return f"{sum(entry.num_bytes for entry in entries) / _GIB:.2f} GiB"
