"""The server under test."""

from __future__ import annotations

import httpx


class TargetError(Exception):
    """The test can't run; the message is one readable line."""


def open_target(base_url: str, api_key: str, timeout: float = 600.0) -> httpx.AsyncClient:
    """A client without a limit on connections.

    Args:
        timeout: seconds of silence.
    """
    return httpx.AsyncClient(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {api_key}"},
        timeout=httpx.Timeout(timeout, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def first_model(http: httpx.AsyncClient) -> str:
    """The first model that the server lists. Raises TargetError."""
    try:
        response = await http.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise TargetError(f"{http.base_url}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise TargetError(f"{http.base_url}: lists no model; name one with --model") from error
