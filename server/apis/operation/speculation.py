"""GET /v1/speculation: what the engine knows about its drafters and does with them."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from server.context import Context

router = APIRouter(tags=["Operation"])


@router.get(
    "/v1/speculation",
    summary="Show what the policy knows about the drafters",
    response_model=None,
)
async def speculation(context: Context) -> Response:
    return JSONResponse(context.engine.speculation())
