"""Engine outputs as /v1/completions responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.request import RequestOutput, TokenLogprob, Usage
from server.apis.completions.best_of import BestOf
from server.apis.completions.schema import Completion, CompletionChoice, CompletionLogprobs
from server.apis.shared.render.head import ResponseHead
from server.apis.shared.render.tokens import (
    api_finish_reason,
    json_logprob,
    num_characters,
    token_text,
)
from server.apis.shared.render.usage import UsageReport
from server.apis.shared.schema.error import ErrorBody
from server.errors import ApiError


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that its choices repeat."""

    text: str
    token_ids: tuple[int, ...]
    first_token_bytes: bytes
    """Bytes of its first token, which has no log-probability to bring them along."""


@dataclass(frozen=True, slots=True)
class CompletionUpdate:
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    prompt_token_ids: tuple[int, ...] | None
    """On a choice's first update, when asked for."""
    token_ids: tuple[int, ...] | None
    """When asked for."""


@dataclass(slots=True)
class _ChoiceState:
    echo: EchoedPrompt | None
    prompt_token_ids: tuple[int, ...] | None
    text_offset: int = 0
    """Where the next token begins in the choice's text."""


class CompletionRenderer:
    """Renders updates of completions; implements `Renderer[CompletionUpdate]`."""

    ends_with_done = True

    def __init__(
        self,
        head: ResponseHead,
        *,
        echoes: Sequence[EchoedPrompt | None],
        prompt_token_ids: Sequence[tuple[int, ...]] | None,
        best_of: BestOf | None,
        with_logprobs: bool,
        usage: UsageReport,
        special_token_ids: frozenset[int],
        shows_special_tokens: bool,
    ) -> None:
        """
        Args:
            echoes: one entry a choice; None: the prompt is not repeated.
            prompt_token_ids: one entry a choice; None: no token ids are told.
            best_of: chooses among what is generated; only for whole responses.
            shows_special_tokens: whether special tokens of the output are part of its text.
        """
        self._head = head
        self._with_token_ids = prompt_token_ids is not None
        told: Sequence[tuple[int, ...] | None] = prompt_token_ids or [None] * len(echoes)
        self._states = [_ChoiceState(echo, ids) for echo, ids in zip(echoes, told, strict=True)]
        self._best_of = best_of
        self._with_logprobs = with_logprobs
        self._usage = usage
        self._special_token_ids = special_token_ids
        self._shows_special_tokens = shows_special_tokens

    def take(self, index: int, output: RequestOutput) -> CompletionUpdate:
        if self._best_of is not None:
            self._best_of.note(index, output)
        state = self._states[index]
        echo, state.echo = state.echo, None
        prompt_token_ids, state.prompt_token_ids = state.prompt_token_ids, None
        logprobs = self._logprobs(state, echo, output) if self._with_logprobs else None
        return CompletionUpdate(
            index=index,
            text=output.text if echo is None else echo.text + output.text,
            logprobs=logprobs,
            finish_reason=api_finish_reason(output),
            stop_reason=output.stop_reason,
            prompt_token_ids=prompt_token_ids,
            token_ids=output.token_ids if self._with_token_ids else None,
        )

    def opening(self, usage: Usage) -> Iterable[Completion]:
        return ()

    def chunks(self, update: CompletionUpdate, usage: Usage) -> Iterable[Completion]:
        has_tokens = update.token_ids or (update.logprobs and update.logprobs.tokens)
        if update.text or update.finish_reason or has_tokens:
            yield self._body([_choice(update)], self._usage.chunk_fields(usage))

    def closing(self, usage: Usage) -> Iterable[Completion]:
        if self._usage.at_end:
            yield self._body([], {"usage": self._usage.body(usage)})

    def failure(self, error: ApiError) -> Iterable[ErrorBody]:
        yield error.body

    def response(self, updates: Sequence[CompletionUpdate], usage: Usage) -> Completion:
        by_choice: list[list[CompletionUpdate]] = [[] for _ in self._states]
        for update in updates:
            by_choice[update.index].append(update)
        choices = [_choice(_join(parts)) for parts in by_choice]
        if self._best_of is not None:
            choices = self._best_of.choices(choices)
        return self._body(choices, {"usage": self._usage.body(usage)})

    def _body(self, choices: list[CompletionChoice], usage: dict[str, Any]) -> Completion:
        return Completion(object="text_completion", choices=choices, **self._head, **usage)

    def _logprobs(
        self, state: _ChoiceState, echo: EchoedPrompt | None, output: RequestOutput
    ) -> CompletionLogprobs:
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if echo is not None and output.prompt_logprobs:
            entries = output.prompt_logprobs
            token_bytes = [
                echo.first_token_bytes if entry is None else entry.token_bytes for entry in entries
            ]
            offsets = prompt_text_offsets(echo, token_bytes, self._special_token_ids)
            for entry, raw, offset in zip(entries, token_bytes, offsets, strict=True):
                _append(logprobs, raw, entry, offset)
            state.text_offset = len(echo.text)
        for entry in output.logprobs:
            _append(logprobs, entry.token_bytes, entry, state.text_offset)
            if self._shows_special_tokens or entry.token_id not in self._special_token_ids:
                state.text_offset += num_characters(entry.token_bytes)
        return logprobs


def prompt_text_offsets(
    echo: EchoedPrompt, token_bytes: Sequence[bytes], special_token_ids: frozenset[int]
) -> list[int]:
    """Where each token of a prompt begins in its text.

    A special token counts only where the text has it; one that the tokenizer added has no width.
    """
    offsets: list[int] = []
    position = 0
    at_start = True
    for token_id, raw in zip(echo.token_ids, token_bytes, strict=True):
        is_special = token_id in special_token_ids
        if at_start and not is_special:
            at_start = False
            if raw.startswith(b" ") and not echo.text.startswith(" ", position):
                position -= 1  # some tokenizers put a space in front that the text does not have
        offsets.append(max(0, position))
        if not is_special or echo.text.startswith(token_text(raw), position):
            position += num_characters(raw)
    return offsets


def _append(
    logprobs: CompletionLogprobs, token_bytes: bytes, entry: TokenLogprob | None, offset: int
) -> None:
    logprobs.tokens.append(token_text(token_bytes))
    logprobs.token_logprobs.append(None if entry is None else json_logprob(entry.logprob))
    logprobs.top_logprobs.append(None if entry is None else _top(entry))
    logprobs.text_offset.append(offset)


def _top(entry: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens by text, and the chosen one even when it is not among them."""
    top: dict[str, float] = {}
    for _, token_bytes, logprob in entry.top:
        top.setdefault(token_text(token_bytes), json_logprob(logprob))
    top.setdefault(token_text(entry.token_bytes), json_logprob(entry.logprob))
    return top


def _join(updates: Sequence[CompletionUpdate]) -> CompletionUpdate:
    last = updates[-1]
    parts = [update.logprobs for update in updates if update.logprobs is not None]
    logprobs = CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )
    return CompletionUpdate(
        index=last.index,
        text="".join(update.text for update in updates),
        logprobs=logprobs if parts else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_token_ids=updates[0].prompt_token_ids,
        token_ids=None
        if last.token_ids is None
        else tuple(token_id for update in updates for token_id in update.token_ids or ()),
    )


def _choice(update: CompletionUpdate) -> CompletionChoice:
    optional: dict[str, Any] = {}
    if update.finish_reason:
        optional["stop_reason"] = update.stop_reason
    if update.prompt_token_ids is not None:
        optional["prompt_token_ids"] = list(update.prompt_token_ids)
    if update.token_ids is not None:
        optional["token_ids"] = list(update.token_ids)
    return CompletionChoice(
        index=update.index,
        text=update.text,
        logprobs=update.logprobs,
        finish_reason=update.finish_reason,
        **optional,
    )
