"""An engine with AsyncEngine's public face that replays scripts instead of running a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.figures import EngineMetrics
from engine.preparation import Preparation
from engine.request import (
    ANSWER_NEXT,
    NO_ADVICE,
    ChatOptions,
    DraftUsage,
    EngineDeadError,
    FinishReason,
    GenerationRequest,
    GrammarSpec,
    QueueFullError,
    RequestError,
    RequestOutput,
    RequestTiming,
    SamplingDefaults,
    TokenLogprob,
    Usage,
)
from engine.sampling.grammar_compiler import CompiledGrammar
from engine.serving.admission import ModelLimits
from engine.serving.async_engine import EngineState, ModelCard, OutputStream
from engine.summary import EngineSummary, ModelSummary

BOS, EOS = 256, 257
NO_DETAILS = {
    "reasoning_tokens": 0,
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
}
"""`completion_tokens_details` of a request without reasoning and prediction."""


@dataclass
class ScriptedTemplate:
    """What the server asks of a chat template; by default it is like Qwen's."""

    source: str = "{{ tools }} <tool_call>"

    def mentions(self, variable: str) -> bool:
        return variable in self.source


class ByteTokenizer:
    """One token a byte, and two control tokens."""

    def __init__(self) -> None:
        self.token_bytes = [bytes([value]) for value in range(256)] + [b"<bos>", b"<eos>"]
        self.special_ids = frozenset({BOS, EOS})
        self.adds_bos = False
        self.chat_template = ScriptedTemplate()
        self.generation_prompt = ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * (self.adds_bos and add_special_tokens) + list(text.encode())

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = ANSWER_NEXT
    ) -> list[int]:
        if messages[-1]["role"] == "assistant" and not options.continue_final_message:
            raise RequestError("The template wants a user last.", param="messages")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(text + self.generation_prompt)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.token_bytes[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.token_bytes[i] for i in ids if i < 256).decode(errors="replace")


@dataclass(frozen=True)
class Step:
    """What one engine step gives a request."""

    text: str
    token_bytes: tuple[bytes, ...]
    """The step's tokens."""
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_code: str | None = None


def words(*texts: str, finish: FinishReason = FinishReason.STOP) -> list[Step]:
    """A script that gives each text as one token."""
    steps = [Step(text, (text.encode(),)) for text in texts]
    steps[-1] = replace(steps[-1], finish=finish)
    return steps


Script = Callable[[GenerationRequest], Sequence[Step]]


def hello(request: GenerationRequest) -> list[Step]:
    """Three tokens, fewer when the request allows fewer."""
    texts = ["Hello", " world", "!"]
    if request.params.max_tokens == 0:
        return [Step("", (), FinishReason.LENGTH)]
    if request.params.max_tokens < len(texts):
        return words(*texts[: request.params.max_tokens], finish=FinishReason.LENGTH)
    return words(*texts)


def logprob(piece: bytes, position: int, num_top: int) -> TokenLogprob:
    """The chosen token is the second likeliest."""
    value = -0.25 * (position + 1)
    top = [(1, b"top", value / 2), (2, piece, value), (3, b"\xe2\x80", float("-inf"))]
    return TokenLogprob(2, piece, value, tuple(top[:num_top]))


@dataclass
class ScriptedEngine:
    script: Script = hello
    state: EngineState = EngineState.READY
    failure: str | None = None
    max_context: int = 128
    max_requests: int = 64
    hold_after: int | None = None
    """Outputs given before a request stalls for ever; None: never stalls."""
    expected_wait: float = 0.0
    pace: float = 0.0
    """Seconds between a request's outputs."""
    load_error: BaseException | None = None
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    submitted: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    figures: EngineMetrics = field(default_factory=EngineMetrics)
    drafters: tuple[str, ...] = ("predicted", "ngram")
    drafts: tuple[DraftUsage, ...] = ()
    """What every output's usage tells about drafts."""
    infills: bool = False
    sampling_defaults: SamplingDefaults = NO_ADVICE

    def __post_init__(self) -> None:
        self.playing: dict[str, asyncio.Task[None]] = {}
        self.streams: dict[str, OutputStream] = {}
        self.encode_gate: asyncio.Event | None = None

    @property
    def limits(self) -> ModelLimits:
        self._require_ready()
        return ModelLimits(self.max_context, vocab_size=260)

    @property
    def card(self) -> ModelCard:
        return ModelCard("tiny/model", 1700000000, self.limits.max_context)

    @property
    def num_requests(self) -> int:
        return len(self.playing)

    def summary(self) -> EngineSummary:
        return EngineSummary(
            name=self.card.name,
            target=ModelSummary(
                architecture="TinyForCausalLM",
                num_parameters=135_000_000,
                weight_bytes=3 << 29,
                weight_format="int8",
                device="cpu",
                kernels="avx2",
                threads=2,
                kv_tokens=4096,
                kv_bytes=96 << 20,
            ),
            drafts={},
            drafters=self.drafters,
            max_context=self.max_context,
            sampling_defaults=self.sampling_defaults,
            has_chat_template=True,
        )

    def metrics(self) -> EngineMetrics:
        self._require_ready()
        return self.figures

    def speculation(self) -> dict[str, Any]:
        self._require_ready()
        return {"drafters": list(self.drafters), "policy": "fixed", "draft_length": 5}

    async def start(self) -> None:
        if self.load_error is not None:
            self.state, self.failure = EngineState.DEAD, str(self.load_error)
            raise self.load_error
        self.state = EngineState.READY

    async def stop(self) -> None:
        self.state = EngineState.STOPPED
        for request_id, task in self.playing.items():
            task.cancel()
            self.streams[request_id].put(
                RequestOutput(
                    request_id,
                    "",
                    (),
                    Usage(0, 0, 0),
                    finish_reason=FinishReason.ERROR,
                    error="The server is shutting down.",
                )
            )
        self.playing.clear()

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self.encode_gate is not None:
            await self.encode_gate.wait()
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        if not self.infills:
            raise RequestError("The model has no infill tokens.", param="suffix")
        return [BOS, *prefix.encode(), EOS, *suffix.encode()]

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = ANSWER_NEXT
    ) -> list[int]:
        return self.tokenizer.encode_chat(messages, options)

    async def decode(self, token_ids: Iterable[int]) -> str:
        return self.tokenizer.decode(token_ids)

    async def compile_grammar(self, spec: GrammarSpec, *, time_limit: float) -> CompiledGrammar:
        if "broken" in spec.text:
            raise RequestError("The output grammar can't be used: it is broken.", param="grammar")
        return CompiledGrammar(spec, start=None)

    async def prepare(
        self, request: GenerationRequest, grammar: CompiledGrammar | None = None
    ) -> Preparation:
        self.limits.check(request)
        return Preparation(grammar)

    def submit(self, request: GenerationRequest, preparation: Preparation) -> OutputStream:
        self._require_ready()
        if len(self.playing) >= self.max_requests:
            message = f"The server already holds {self.max_requests} requests."
            raise QueueFullError(message, self.expected_wait)
        if request.request_id in {known.request_id for known in self.submitted}:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        self.submitted.append(request)
        stream = self.streams[request.request_id] = OutputStream(self, request.request_id)
        self.playing[request.request_id] = asyncio.create_task(self._play(request, stream))
        return stream

    def abort(self, request_id: str) -> None:
        task = self.playing.pop(request_id, None)
        if task is not None:
            task.cancel()
            self.aborted.append(request_id)

    def _require_ready(self) -> None:
        if self.state is not EngineState.READY:
            raise EngineDeadError(f"The engine is {self.state}: {self.failure}.")

    async def _play(self, request: GenerationRequest, stream: OutputStream) -> None:
        async for output in self._outputs(request):
            if output.finish_reason is not None:
                del self.playing[request.request_id]
            stream.put(output)
            await asyncio.sleep(self.pace)

    async def _outputs(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        num_tokens, params = 0, request.params
        arrived = time.monotonic()
        first_token = None
        for number, step in enumerate(self.script(request)):
            if number == self.hold_after:
                await asyncio.Event().wait()
            positions = range(num_tokens, num_tokens + len(step.token_bytes))
            num_tokens += len(step.token_bytes)
            first_token = first_token or time.monotonic()
            yield RequestOutput(
                request_id=request.request_id,
                text=step.text,
                token_ids=tuple(positions),
                usage=Usage(
                    len(request.prompt_token_ids),
                    num_tokens,
                    cached_tokens=1,
                    target_passes=number + 1,
                    drafts=self.drafts,
                    prediction_tokens=len((request.prediction or "").encode()),
                ),
                logprobs=()
                if params.logprobs is None
                else tuple(
                    logprob(piece, position, params.logprobs)
                    for piece, position in zip(step.token_bytes, positions, strict=True)
                ),
                prompt_logprobs=self._prompt_logprobs(request) if number == 0 else None,
                finish_reason=step.finish,
                stop_reason=step.stop_reason,
                error=step.error,
                error_code=step.error_code,
                timing=RequestTiming(arrived, arrived, first_token, time.monotonic())
                if step.finish
                else None,
            )

    def _prompt_logprobs(
        self, request: GenerationRequest
    ) -> tuple[TokenLogprob | None, ...] | None:
        num_top = request.params.prompt_logprobs
        if num_top is None:
            return None
        pieces = [self.tokenizer.token_bytes[i] for i in request.prompt_token_ids]
        rest = [logprob(piece, position, num_top) for position, piece in enumerate(pieces[1:])]
        ids = request.prompt_token_ids[1:]
        return (None, *(replace(entry, token_id=i) for entry, i in zip(rest, ids, strict=True)))
