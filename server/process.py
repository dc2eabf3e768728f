"""What a serving process needs of its operating system: a listening socket and stop signals."""

from __future__ import annotations

import signal
import socket
from types import FrameType

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections queue on it until someone accepts them.

    Raises:
        OSError: the address is taken or is not this machine's.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def exit_on_stop_signals() -> None:
    """Make SIGINT and SIGTERM end the process with exit code 0, wherever it is.

    A container's first process ignores SIGTERM unless it has a handler.
    """
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop_signal, _exit)


def _exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
