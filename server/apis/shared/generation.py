"""Generation: the engine's work behind one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import replace
from typing import Self, TypeVar

from engine.request import (
    QUEUE_TIMEOUT,
    DraftUsage,
    FinishReason,
    RequestOutput,
    Usage,
)
from engine.serving.async_engine import AsyncEngine, OutputStream
from server.apis.shared.prompt.prepared_prompt import PreparedPrompt
from server.errors import NO_FAULTS, ApiError, deadline_passed, retry_later
from server.middleware.admission import Ticket
from server.observability.request_record import SequenceRecord, current_record

T = TypeVar("T")


class Generation:
    """`num_choices` sequences a prompt; number p * num_choices + c is choice c of prompt p.

    Whoever submits it must see to it that `close` is called.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[PreparedPrompt],
        num_choices: int,
        deadline: float | None,
    ) -> None:
        self._engine = engine
        self._deadline = deadline
        self._num_choices = num_choices
        self._streams: list[OutputStream] = []
        self._record = current_record.get()
        self._usages = [
            Usage(len(prompt.token_ids), 0, 0) for prompt in prompts for _ in range(num_choices)
        ]

    @classmethod
    def submit(
        cls,
        engine: AsyncEngine,
        prompts: Sequence[PreparedPrompt],
        *,
        num_choices: int,
        response_id: str,
        ticket: Ticket,
    ) -> Self:
        """Queue every sequence, or none.

        Raises:
            QueueFullError, EngineDeadError: as `AsyncEngine.submit`.
        """
        generation = cls(engine, prompts, num_choices, ticket.deadline)
        if generation._record is not None:
            first = prompts[0]
            generation._record.begin(engine.card.name, response_id, first.params, first.source)
        try:
            for number, prompt in enumerate(prompts):
                for choice in range(num_choices):
                    request = replace(
                        prompt.request,
                        request_id=f"{response_id}-{number * num_choices + choice}",
                        params=prompt.params.for_choice(choice),
                        client=ticket.client,
                        queue_timeout=ticket.queue_timeout,
                    )
                    generation._streams.append(engine.submit(request, prompt.preparation))
        except BaseException:
            generation.close()
            raise
        return generation

    @property
    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once, however many choices share it."""
        once_per_prompt = self._usages[:: self._num_choices]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in once_per_prompt),
            completion_tokens=sum(usage.completion_tokens for usage in self._usages),
            cached_tokens=sum(usage.cached_tokens for usage in once_per_prompt),
            target_passes=sum(usage.target_passes for usage in self._usages),
            drafts=_total_drafts(self._usages),
            prediction_tokens=sum(usage.prediction_tokens for usage in self._usages),
        )

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(sequence, output) as they come, until every sequence has finished.

        Raises:
            ApiError: the engine gave a sequence up, or the deadline has passed.
        """
        if len(self._streams) == 1:
            finished = False
            while not finished:
                output = self._note(0, await self._in_time(anext(self._streams[0])))
                finished = output.finish_reason is not None
                yield 0, output
            return
        arrivals: asyncio.Queue[tuple[int, RequestOutput | BaseException]] = asyncio.Queue(
            maxsize=len(self._streams)  # what waits unread waits in the streams, which have a bound
        )
        readers = [
            asyncio.create_task(_read(number, stream, arrivals))
            for number, stream in enumerate(self._streams)
        ]
        try:
            num_open = len(readers)
            while num_open:
                number, arrival = await self._in_time(arrivals.get())
                if isinstance(arrival, BaseException):
                    raise arrival
                num_open -= arrival.finish_reason is not None
                yield number, self._note(number, arrival)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def close(self) -> None:
        """Abort whatever has not finished. Idempotent."""
        if self._record is not None:
            self._record.usage = self.usage
        for stream in self._streams:
            stream.close()

    async def _in_time(self, coming: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await coming
        except TimeoutError as error:
            raise deadline_passed() from error

    def _note(self, number: int, output: RequestOutput) -> RequestOutput:
        if output.finish_reason is not None and self._record is not None:
            self._record.sequences.append(SequenceRecord(output.finish_reason, output.timing))
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            alive = not self._engine.state.has_ended
            message = output.error or "The engine ended the request."
            if output.error_code == QUEUE_TIMEOUT:
                raise retry_later(503, message, QUEUE_TIMEOUT, self._engine.expected_wait)
            raise ApiError(500 if alive else 503, message, code="generation_failed")
        self._usages[number] = output.usage
        return output


def _total_drafts(usages: Sequence[Usage]) -> tuple[DraftUsage, ...]:
    totals: dict[str, list[int]] = {}
    for draft in [draft for usage in usages for draft in usage.drafts]:
        counts = totals.setdefault(draft.drafter, [0, 0])
        counts[0] += draft.drafted
        counts[1] += draft.accepted
    return tuple(DraftUsage(name, *counts) for name, counts in totals.items())


async def _read(
    number: int,
    stream: OutputStream,
    arrivals: asyncio.Queue[tuple[int, RequestOutput | BaseException]],
) -> None:
    try:
        async for output in stream:
            await arrivals.put((number, output))
    except NO_FAULTS:
        raise
    except BaseException as error:
        await arrivals.put((number, error))
