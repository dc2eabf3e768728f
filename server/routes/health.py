"""GET /health: 200 only when requests can be served."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from engine.async_engine import EngineState
from server.context import Context

_BROKEN = frozenset({EngineState.STALLED, EngineState.DEAD, EngineState.STOPPED})

router = APIRouter(tags=["Operation"])


@router.get("/health", summary="Tell whether requests can be served", response_model=None)
async def health(
    context: Context, probe: Literal["readiness", "liveness"] = "readiness"
) -> Response:
    """`liveness` asks whether the process is worth keeping, also while it loads or drains."""
    state, draining = context.engine.state, context.admission.draining
    if state is EngineState.READY:
        status = {"status": "draining" if draining else "ok"}
    else:
        status = {"status": str(state)}
    if context.engine.failure is not None:
        status["reason"] = context.engine.failure
    good = state not in _BROKEN if probe == "liveness" else status["status"] == "ok"
    return JSONResponse(status, status_code=200 if good else 503)
