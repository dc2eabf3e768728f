"""`slipstream pull`: fetches a model ahead of its use."""

from __future__ import annotations

import argparse

from server.cli.command import CommandError, Run, Subcommand
from server.observability.load_progress import showing_progress
from server.observability.logs import configure_logging


def _configure(parser: argparse.ArgumentParser) -> Run:
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
            with showing_progress():
                files = resolve(arguments.ref)
        except (ModelSourceError, CacheError) as error:
            raise CommandError(str(error)) from error
        print(files.weights)

    return run


COMMAND = Subcommand("pull", "fetch a model ahead of its use and print where it is", _configure)
