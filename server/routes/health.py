"""GET /health: 200 only when requests can be served."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from engine.async_engine import EngineState
from server.context import Context

router = APIRouter(tags=["Operation"])


@router.get("/health", summary="Tell whether requests can be served", response_model=None)
async def health(context: Context) -> Response:
    if context.admission.draining:
        return JSONResponse({"status": "draining"}, status_code=503)
    engine = context.engine
    if engine.state is EngineState.READY:
        return JSONResponse({"status": "ok"})
    status = {"status": str(engine.state)}
    if engine.failure is not None:
        status["reason"] = engine.failure
    return JSONResponse(status, status_code=503)
