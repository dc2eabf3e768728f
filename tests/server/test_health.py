"""GET /health, as probes ask it."""

from __future__ import annotations

import pytest

from engine.serving.async_engine import EngineState


@pytest.mark.parametrize(
    ("state", "readiness", "liveness"),
    [
        (EngineState.READY, 200, 200),
        (EngineState.LOADING, 503, 200),
        (EngineState.RESTARTING, 503, 200),
        (EngineState.STALLED, 503, 503),
        (EngineState.DEAD, 503, 503),
    ],
)
async def test_probes_tell_loading_from_dead(client, engine, state, readiness, liveness):
    engine.state = state
    for query, expected in (("", readiness), ("?probe=liveness", liveness)):
        response = await client.http.get(f"/health{query}")
        assert response.status_code == expected
        assert response.json()["status"] == ("ok" if state is EngineState.READY else state)


async def test_a_draining_server_is_alive_but_not_ready(client, app):
    app.state.context.admission.draining = True
    response = await client.http.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "draining"})
    response = await client.http.get("/health?probe=liveness")
    assert (response.status_code, response.json()) == (200, {"status": "draining"})


async def test_the_reason_is_told(client, engine):
    engine.state, engine.failure = EngineState.DEAD, "RuntimeError: broken"
    response = await client.http.get("/health")
    assert response.json() == {"status": "dead", "reason": "RuntimeError: broken"}


async def test_unknown_probe_is_refused(client):
    response = await client.http.get("/health?probe=startup")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "probe"
