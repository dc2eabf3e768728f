"""API keys: read once, kept as digests, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.config import ConfigError

ENVIRONMENT_VARIABLE = "SLIPSTREAM_API_KEY"
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64}):(?P<key>.+)")
_KEY = re.compile(r"[!-~]+")
_DIGEST_DIGITS = 8


class ApiKeys:
    """The keys of a server, as SHA-256 digests, and whose they are. Empty: the server is open."""

    def __init__(self, clients: Mapping[bytes, str]) -> None:
        """
        Args:
            clients: name of the client by the SHA-256 digest of its key.
        """
        self._clients = tuple(clients.items())

    def __len__(self) -> int:
        return len(self._clients)

    def client_of(self, key: bytes) -> str | None:
        """Name of the client whose key it is; None: nobody's.

        The time does not tell how near a wrong key comes: digests are compared, each in constant
        time, and always all of them.
        """
        digest = _digest(key)
        found = None
        for known, client in self._clients:
            if hmac.compare_digest(known, digest):
                found = client
        return found


def load_api_keys(path: Path | None, environment: str) -> ApiKeys:
    """The keys of a file and of the environment variable together.

    Args:
        path: one key a line, ``KEY`` or ``NAME:KEY``; empty lines and lines that begin with # don't
            count. Keys of one name belong to one client.
        environment: value of `ENVIRONMENT_VARIABLE`: keys separated by commas.

    Raises:
        OSError: the file can't be read.
        ConfigError: there is a source, but no key in it, or something that can't be one.
    """
    clients: dict[bytes, str] = {}
    if path is not None:
        _add(clients, _lines(path), f"api_keys_file: {path}")
    if environment.strip():
        entries = [(f"key {n}", None, key) for n, key in enumerate(environment.split(","), 1)]
        _add(clients, entries, ENVIRONMENT_VARIABLE)
    return ApiKeys(clients)


Entry = tuple[str, str | None, str]
"""Where it stands, the client's name, the key."""


def _lines(path: Path) -> Iterable[Entry]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"api_keys_file: {path}: not a text file") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#"):
            named = _NAMED.fullmatch(line.strip())
            name, key = (named["name"], named["key"]) if named else (None, line)
            yield f"line {number}", name, key


def _add(clients: dict[bytes, str], entries: Iterable[Entry], source: str) -> None:
    num_before = len(clients)
    for place, name, spaced_key in entries:
        key = spaced_key.strip()
        if not key:
            continue
        if _KEY.fullmatch(key) is None:
            raise ConfigError(f"{source}: {place}: a key is visible ASCII without spaces")
        digest = _digest(key.encode())
        if digest in clients:
            raise ConfigError(f"{source}: {place}: this key was given before")
        clients[digest] = name or f"key-{digest.hex()[:_DIGEST_DIGITS]}"
    if len(clients) == num_before:
        raise ConfigError(f"{source}: no key in it")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
