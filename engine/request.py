"""Plain data that crosses the engine's border: what a client asks, what the engine answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

SEED_MASK = (1 << 63) - 1
QUEUE_TIMEOUT = "queue_timeout"
"""Error code of a request that waited too long."""
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""Error code of a request whose prompt and answer do not fit the context together."""


class RequestError(ValueError):
    """A request the engine refuses; the client's fault.

    Attributes:
        param: the request field at fault, in the API's spelling, or None.
        code: a machine-readable reason such as ``context_length_exceeded``, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(RuntimeError):
    """The waiting queue is at its limit; the client may try again later.

    Attributes:
        expected_wait: seconds until those that wait now will have left, at the recent pace.
    """

    def __init__(self, message: str, expected_wait: float) -> None:
        super().__init__(message)
        self.expected_wait = expected_wait


class EngineDeadError(RuntimeError):
    """The engine is loading, stopped or has failed; it can't take or finish requests."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded. Ranges are checked where the values enter (the HTTP schemas).

    `seed` makes the output a function of the request alone: the noise for an output token is a
    hash of (seed, output position, token id).
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """Alternatives listed for each output token (0: only the token's own); None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens; such a request takes no prefix-cache hits."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def for_choice(self, index: int) -> SamplingParams:
        """These parameters with the seed of the `index`-th of `n` choices (0: unchanged)."""
        if index == 0:
            return self
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(digest, "little") & SEED_MASK)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's makers advise where a client asks for nothing; None: no advice."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


NO_ADVICE = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a chat template renders a conversation."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions the model may call, each in OpenAI's form."""
    add_generation_prompt: bool = True
    """Whether the prompt ends where a new answer begins."""
    continue_final_message: bool = False
    """Whether the prompt ends inside the last message, which the answer continues."""
    template_args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further variables of the template, such as ``enable_thinking``."""


ANSWER_NEXT = ChatOptions()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The conversation behind a chat prompt, so that a draft model can render its own template.

    Each message is ``{"role": str, "content": str}``, with ``tool_calls``, ``tool_call_id``,
    ``name`` and ``reasoning_content`` where it has them.
    """

    messages: tuple[Mapping[str, Any], ...]
    options: ChatOptions = ANSWER_NEXT


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The plain text behind a completions prompt."""

    text: str


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """What one request asks of speculation. None of it changes the output, but `accept_top_k`."""

    mode: str = "auto"
    """"auto", "off" or the name of a drafter."""
    max_draft_tokens: int | None = None
    """Longest draft; None: as long as the engine sees fit."""
    accept_top_k: int | None = None
    """LOSSY: also accept a draft token among the target's k likeliest; None: only the target's
    own token."""


GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "rules"]


@dataclass(frozen=True, slots=True)
class Prelude:
    """Free text in front of constrained text: a model's reasoning between its tags."""

    end: str
    start: str | None
    """None: the prompt has opened it, so that it must come; else it may be left out."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What every output of a request must match, whole. The model's end token comes behind it."""

    kind: GrammarKind
    text: str = ""
    """By kind: nothing, a JSON schema, a regular expression, a JSON list of strings, a client's
    grammar in Lark's or GBNF's syntax, rules in Lark's syntax that the server has put together of
    JSON schemas."""
    prelude: Prelude | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. Plain and picklable."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    source: ChatPrompt | TextPrompt
    """What the prompt was made from, before the target's tokenizer."""
    prediction: str | None = None
    """Text the client expects in the output."""
    speculation: SpeculationParams = SpeculationParams()
    grammar: GrammarSpec | None = None
    client: str = ""
    """Whose request it is; clients share the engine fairly."""
    cache_scope: str = ""
    """It shares cached prompt prefixes only with requests of the same scope."""
    priority: int = 0
    """Requests with a lower one are served first."""
    queue_timeout: float | None = None
    """Seconds it may wait for its first step; then it ends with an error. None: as long as it
    takes."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability and the likeliest alternatives, from the unprocessed logits."""

    token_id: int
    token_bytes: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...]
    """(token id, its bytes, log-probability), likeliest first."""


@dataclass(frozen=True, slots=True)
class DraftUsage:
    """What one drafter did for one request."""

    drafter: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    target_passes: int = 0
    """Passes of the target that gave output tokens."""
    drafts: tuple[DraftUsage, ...] = ()
    """Drafters that proposed anything."""
    prediction_tokens: int = 0
    """Length of the request's prediction in tokens."""


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """When what happened to one request: seconds on the engine's clock (`time.monotonic`)."""

    arrived: float
    scheduled: float | None
    """When it left the queue; None: it never did."""
    first_token: float | None
    finished: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one engine step added to one request.

    A stream of these ends with the first whose `finish_reason` is set.
    """

    request_id: str
    text: str
    """New text: whole characters, with any text that may still become a stop string held back."""
    token_ids: tuple[int, ...]
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry for each of `token_ids` when asked for, else empty."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """On the first output of a request that asked for them; None stands for the first token."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the text, if one did."""
    error: str | None = None
    """Why, when `finish_reason` is ERROR."""
    error_code: str | None = None
    """The same in machine-readable form, such as `QUEUE_TIMEOUT`, where there is one."""
    timing: RequestTiming | None = None
    """With `finish_reason`, where the engine itself ended the request."""
