"""The socket a server listens on."""

from __future__ import annotations

import socket

BACKLOG = 2048
DEAD_PEER_SECONDS = 60
"""After which a connection ends whose client neither answers nor takes what was sent to it."""
_PROBES = 4


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections queue on it until someone accepts them.

    The connections inherit its options: a client that vanished, or has stopped reading, holds
    neither a descriptor nor a request for ever.

    Raises:
        OSError: the address is taken or is not this machine's.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", DEAD_PEER_SECONDS // 2),
        ("TCP_KEEPINTVL", DEAD_PEER_SECONDS // 2 // _PROBES),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", 1000 * DEAD_PEER_SECONDS),
    ):
        if hasattr(socket, name):  # not on every system
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listener


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{port}"
