"""`slipstream serve`: serves a model over HTTP."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import traceback
from contextlib import ExitStack
from pathlib import Path

from engine.config import Config
from server.cli.command import CommandError, Run, Subcommand, add_config_arguments
from server.middleware.api_keys import ENVIRONMENT_VARIABLE, ApiKeys, load_api_keys
from server.observability.logs import configure_logging
from server.process.listener import listen
from server.process.signals import exit_on_stop_signals
from server.process.tls import check_certificate


def _configure(parser: argparse.ArgumentParser) -> Run:
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


COMMAND = Subcommand("serve", "serve a model over HTTP with OpenAI's API", _configure)


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
