"""GET /health: 200 only when requests can be served."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response

from engine.serving.async_engine import EngineState
from server.apis.operation.schema import Health
from server.apis.shared.http.json_response import json_response
from server.apis.shared.schema.error import ErrorBody
from server.context import Context

_BROKEN = frozenset({EngineState.STALLED, EngineState.DEAD, EngineState.STOPPED})

router = APIRouter(tags=["Operation"])


@router.get(
    "/health",
    summary="Tell whether requests can be served",
    response_model=None,
    responses={200: {"model": Health}, 503: {"model": Health}, "4XX": {"model": ErrorBody}},
)
async def health(
    context: Context, probe: Literal["readiness", "liveness"] = "readiness"
) -> Response:
    """`liveness` asks whether the process is worth keeping, also while it loads or drains."""
    state, draining = context.engine.state, context.admission.draining
    status = str(state)
    if state is EngineState.READY:
        status = "draining" if draining else "ok"
    failure = context.engine.failure
    health = Health(status=status) if failure is None else Health(status=status, reason=failure)
    good = state not in _BROKEN if probe == "liveness" else status == "ok"
    return json_response(health, 200 if good else 503)
