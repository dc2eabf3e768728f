"""The certificate that HTTPS is served with."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

from engine.config import ConfigError


def check_certificate(certfile: Path, keyfile: Path | None) -> None:
    """Try the files before anything listens.

    Args:
        certfile: PEM; holds the key too when `keyfile` is None.

    Raises:
        ConfigError: they can't be used; says why in one line.
    """

    def refuse_password() -> NoReturn:
        raise ConfigError("ssl_keyfile: the key is encrypted; give one without a passphrase")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password=refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError("ssl_keyfile: the key does not belong to ssl_certfile") from error
        files = f"{certfile}" if keyfile is None else f"{certfile} and {keyfile}"
        raise ConfigError(
            f"ssl_certfile: {files}: no certificate with its key in PEM form"
        ) from error
