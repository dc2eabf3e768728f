"""Responses about the server itself."""

from __future__ import annotations

from server.apis.shared.schema.base import ResponseModel


class Version(ResponseModel):
    version: str


class Health(ResponseModel):
    status: str
    reason: str | None = None
    """What is wrong with the engine, in one line."""
