"""RequestRecord: what is known about one HTTP request when it is over, for logs and traces.

No prompt, no answer, no key and no client address belongs in here.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from engine.request import (
    ChatPrompt,
    FinishReason,
    RequestTiming,
    SamplingParams,
    TextPrompt,
    Usage,
)


@dataclass(slots=True)
class SequenceRecord:
    """One generated sequence (a request has several with `n`, `best_of` or a list of prompts)."""

    finish_reason: FinishReason
    timing: RequestTiming | None
    """None: the engine was gone before it ended the sequence."""


@dataclass(slots=True)
class RequestRecord:
    request_id: str
    method: str
    route: str
    """The route's path with its parameters as names, not values."""
    status: int = 0
    """0: no answer began, because the client had gone."""
    seconds: float = 0.0
    operation: str = ""
    """"chat" or "text_completion" for a request that generated something, else empty."""
    response_id: str = ""
    model: str = ""
    params: SamplingParams | None = None
    """Of the first sequence."""
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    """Of all sequences together."""
    sequences: list[SequenceRecord] = field(default_factory=list)
    """Those that have ended, in the order in which they did."""
    not_enforced: list[str] = field(default_factory=list)
    """Keywords of the request's schemas that its output may violate."""

    def begin(
        self,
        model: str,
        response_id: str,
        params: SamplingParams,
        source: ChatPrompt | TextPrompt,
    ) -> None:
        """Note that the request has been handed to the engine."""
        self.model, self.response_id, self.params = model, response_id, params
        self.operation = "chat" if isinstance(source, ChatPrompt) else "text_completion"

    def fields(self) -> dict[str, Any]:
        """The request in one flat record, JSON types only."""
        values: dict[str, Any] = {
            "event": "request",
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "duration_s": round(self.seconds, 6),
        }
        if self.operation:
            values |= {
                "model": self.model,
                "response_id": self.response_id,
                "finish_reasons": [str(sequence.finish_reason) for sequence in self.sequences],
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "output_tokens": self.usage.completion_tokens,
                "target_passes": self.usage.target_passes,
                **_waits(self.sequences),
            }
        return values


def _waits(sequences: list[SequenceRecord]) -> dict[str, float]:
    values = {}
    timings = [sequence.timing for sequence in sequences if sequence.timing is not None]
    queued = [t.scheduled - t.arrived for t in timings if t.scheduled is not None]
    first = [t.first_token - t.arrived for t in timings if t.first_token is not None]
    if queued:
        values["queue_s"] = round(max(queued), 6)
    if first:
        values["ttft_s"] = round(min(first), 6)
    return values


current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")
"""Of the HTTP request that the running task works for; empty outside one."""

current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)
"""Of the same request; None outside one."""
