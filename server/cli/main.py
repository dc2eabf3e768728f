"""The `slipstream` command. Heavy imports wait until a subcommand needs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from engine.config import ConfigError
from server.cli import bench, cache, doctor, pull, serve
from server.cli.command import CommandError, Run
from server.version import VERSION

EXIT_FAILURE = 1
EXIT_USAGE = 2

SUBCOMMANDS = (serve.COMMAND, bench.COMMAND, doctor.COMMAND, pull.COMMAND, cache.COMMAND)


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slipstream",
        description="OpenAI-compatible LLM inference server with universal assisted generation.",
    )
    parser.add_argument("--version", action="version", version=f"slipstream {VERSION}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for subcommand in SUBCOMMANDS:
        subparser = subparsers.add_parser(
            subcommand.name, help=subcommand.summary, description=subcommand.summary
        )
        subparser.set_defaults(run=subcommand.configure(subparser))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = make_parser().parse_args(argv)
    run: Run = arguments.run
    try:
        run(arguments)
    except (CommandError, ConfigError) as error:
        print(f"slipstream: error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE
    return 0


if __name__ == "__main__":
    sys.exit(main())
