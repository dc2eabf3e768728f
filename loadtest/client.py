"""Sends one streamed request to an OpenAI-compatible server and times what comes back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Record:
    """What one request did. Times in seconds on one monotonic clock."""

    category: str
    started: float
    """When the request was due: waiting for its turn in the client counts as the server's time."""
    ended: float
    chunk_times: tuple[float, ...] = ()
    """When each chunk with text came; one chunk may hold several tokens."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    """The kind of failure, None if the answer is complete."""

    @property
    def e2e(self) -> float:
        return self.ended - self.started

    @property
    def ttft(self) -> float | None:
        """Time to the first text."""
        return self.chunk_times[0] - self.started if self.chunk_times else None

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first."""
        if not self.chunk_times or self.completion_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between successive chunks."""
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


class _StreamError(Exception):
    """The stream did not hold a complete answer; the message is the kind of failure."""


class Client:
    """Speaks to one server. `body` has the fields every request gets."""

    def __init__(
        self, http: httpx.AsyncClient, body: Mapping[str, Any], clock: Clock = time.perf_counter
    ) -> None:
        self._http = http
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._clock = clock

    async def send(
        self, category: str, path: str, body: Mapping[str, Any], due: float | None = None
    ) -> Record:
        """Send a request and read its whole answer.

        Args:
            due: when it should have been sent, on the client's clock; default: now.
        """
        answer = _Answer()
        started = self._clock() if due is None else due
        error = None
        try:
            async with self._http.stream("POST", path, json={**self._body, **body}) as response:
                if response.status_code != httpx.codes.OK:
                    raise _StreamError(_refusal(response.status_code, await response.aread()))
                async for line in response.aiter_lines():
                    answer.add(line, self._clock())
            answer.require_complete()
        except _StreamError as failure:
            error = str(failure)
        except httpx.TimeoutException:
            error = "timeout"
        except httpx.ConnectError:
            error = "connection refused"
        except httpx.TransportError:
            error = "connection lost"
        return Record(
            category=category,
            started=started,
            ended=self._clock(),
            chunk_times=tuple(answer.chunk_times),
            prompt_tokens=answer.usage.get("prompt_tokens", 0),
            completion_tokens=answer.usage.get("completion_tokens", 0),
            text="".join(answer.pieces),
            finish_reason=answer.finish_reason,
            error=error,
        )


class _Answer:
    """Collects the events of one stream."""

    def __init__(self) -> None:
        self.chunk_times: list[float] = []
        self.pieces: list[str] = []
        self.usage: dict[str, int] = {}
        self.finish_reason: str | None = None
        self._done = False

    def add(self, line: str, now: float) -> None:
        if not line.startswith("data:"):
            return
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            self._done = True
            return
        try:
            self._take(json.loads(data), now)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise _StreamError("malformed event") from error

    def _take(self, event: Any, now: float) -> None:
        if "error" in event:
            raise _StreamError(f"error event: {event['error'].get('code') or 'no code'}")
        self.usage = dict(event.get("usage") or self.usage)
        for choice in event.get("choices") or []:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            piece = choice.get("text") or (choice.get("delta") or {}).get("content")
            if piece:
                self.chunk_times.append(now)
                self.pieces.append(str(piece))

    def require_complete(self) -> None:
        if not self._done or self.finish_reason is None:
            raise _StreamError("stream ended early")
        if "completion_tokens" not in self.usage:
            raise _StreamError("no usage")


def _refusal(status: int, content: bytes) -> str:
    try:
        error = json.loads(content)["error"]
        return f"HTTP {status}: {error.get('code') or error.get('type') or 'no code'}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"HTTP {status}"
