"""RequestState: what the core keeps of a request from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import TokenLogprob
from engine.scheduling.sequence import TokenSequence
from engine.text.stream import TextStream


@dataclass(slots=True)
class RequestState:
    """A request's tokens and KV blocks, its text, and what its figures are made of."""

    sequence: TokenSequence
    """The scheduler's part."""
    text: TextStream
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_steps: int = 0
    """Steps that computed a chunk of the request."""
    target_passes: int = 0
    """Those that gave output tokens."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """Drafted and accepted tokens by drafter."""
    queue_time_noted: bool = False
    first_token_time: float | None = None
    last_token_time: float = 0.0

    @property
    def request_id(self) -> str:
        return self.sequence.request_id
