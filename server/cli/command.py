"""What every subcommand of `slipstream` is made of."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic_settings import CliSettingsSource

from engine.config import Config, load_config


class CommandError(Exception):
    """A subcommand can't go on; the message is one readable line."""


Run = Callable[[argparse.Namespace], None]


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One entry of the command line.

    `configure` adds the arguments and returns the function that carries the command out.
    """

    name: str
    summary: str
    configure: Callable[[argparse.ArgumentParser], Run]


def add_config_arguments(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace], Config]:
    """Add `--config` and a flag for every configuration key; returns the resolver.

    The resolver raises `ConfigError`.
    """
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file with configuration keys; environment variables such as "
        "SLIPSTREAM_KV__BLOCK_SIZE and the flags below take precedence",
    )
    source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        Config, root_parser=parser
    )
    return lambda arguments: load_config(arguments.config, cli=source(parsed_args=arguments))
