"""A server that drains: after a stop signal it finishes what it has and takes nothing more."""

from __future__ import annotations

import asyncio
import logging
from types import FrameType

import uvicorn

from engine.serving.async_engine import AsyncEngine, EngineState
from server.middleware.admission import Admission

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


class DrainingServer(uvicorn.Server):
    """Keeps listening while requests are in progress, so that new ones are told to go elsewhere.

    Requests that outlast the drain time, or are there at a second signal, end in an error that
    their clients can read.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: AsyncEngine,
        admission: Admission,
        drain_seconds: float,
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._admission = admission
        self._drain_seconds = drain_seconds
        self._hurry = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and not self._hurry:
            self._hurry = True
        else:
            super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        await super().main_loop()
        await self._drain()

    async def _drain(self) -> None:
        self._admission.draining = True
        if self._engine.state is EngineState.LOADING:
            return
        if self._admission.num_requests:
            logger.info(
                "stopping in %g s at most, requests in progress: %d",
                self._drain_seconds,
                self._admission.num_requests,
            )
        if not await self._became_idle():
            logger.warning("stopping, requests cut off: %d", self._admission.num_requests)
            await self._engine.stop()

    async def _became_idle(self) -> bool:
        """False: the time is over, or whoever sent the signal has lost patience."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_seconds
        idle = asyncio.create_task(self._admission.wait_until_idle())
        try:
            while not idle.done() and not self._hurry and loop.time() < deadline:
                await asyncio.wait({idle}, timeout=min(_POLL_SECONDS, self._drain_seconds))
            return idle.done()
        finally:
            idle.cancel()
