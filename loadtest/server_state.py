"""What a server holds, by its own /metrics: blocks, tasks, descriptors, memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

_SETTLE_SECONDS = 30.0


class NotIdleError(Exception):
    """The server still works although nobody asks it for anything; the message says on what."""


@dataclass(frozen=True, slots=True)
class ServerState:
    running: int
    waiting: int
    kv_usage: float
    tasks: int
    descriptors: int
    resident_bytes: int

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting and self.kv_usage == 0


async def read_state(http: httpx.AsyncClient) -> ServerState:
    """
    Raises:
        httpx.HTTPError: the server can't be reached, or shows no metrics.
        KeyError: one of the figures is missing.
    """
    response = await http.get("/metrics")
    response.raise_for_status()
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if not sample.labels
    }
    return ServerState(
        running=int(values["slipstream_num_requests_running"]),
        waiting=int(values["slipstream_num_requests_waiting"]),
        kv_usage=values["slipstream_kv_cache_usage_perc"],
        tasks=int(values["slipstream_event_loop_tasks"]),
        descriptors=int(values["process_open_fds"]),
        resident_bytes=int(values["process_resident_memory_bytes"]),
    )


async def settled_state(http: httpx.AsyncClient) -> ServerState:
    """The state once the last requests have left, and their connections with them.

    Raises:
        NotIdleError: they don't leave.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    state = await read_state(http)
    while True:
        await asyncio.sleep(0.5)
        before, state = state, await read_state(http)
        same = (state.tasks, state.descriptors) == (before.tasks, before.descriptors)
        if state.is_idle and same:
            return state
        if time.monotonic() > deadline:
            raise NotIdleError(f"the server does not come to rest: {state}")
