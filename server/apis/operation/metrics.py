"""GET /metrics: Prometheus exposition."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import generate_latest

# Not OpenMetrics: prometheus_client turns the colon of vLLM's names into an underscore there.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter(tags=["Operation"])


@router.get(
    "/metrics",
    summary="Show figures for Prometheus",
    response_model=None,
    response_class=PlainTextResponse,
)
async def metrics(request: Request) -> Response:
    body = generate_latest(request.app.state.metrics_registry)
    return Response(body, headers={"Content-Type": CONTENT_TYPE})
