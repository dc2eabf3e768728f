"""GET /version."""

from __future__ import annotations

from fastapi import APIRouter

from server.apis.operation.schema import Version
from server.version import VERSION

router = APIRouter(tags=["Operation"])


@router.get("/version", summary="Tell the server's version")
async def version() -> Version:
    return Version(version=VERSION)
