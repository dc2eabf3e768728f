"""Tools of types that this server lacks: a request goes on without them where it has others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

from engine.request import RequestError
from server.apis.shared.schema.common import UnservedTool

logger = logging.getLogger(__name__)

T = TypeVar("T")


def served_tools(tools: Sequence[T | UnservedTool] | None) -> list[T]:
    """The tools less those that can't be served, which are named in the log.

    Raises:
        RequestError: no tool is left; names the first one's type.
    """
    served = [tool for tool in tools or () if not isinstance(tool, UnservedTool)]
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, UnservedTool):
            continue
        if not served:
            param = f"tools.{number}.type"
            raise RequestError(
                f"'{param}': this server has no tools of type {tool.type[:64]!r}.",
                param=param,
                code="unsupported_parameter",
            )
        logger.warning("a tool of type %r is left out: this server has none", tool.type[:64])
    return served
