"""TextStream: the text side of one request's output."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import FinishReason, SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stops import StopMatcher
from engine.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TextStep:
    """What a run of committed tokens means for the text."""

    num_tokens: int
    """Tokens that count; those behind a stop are dropped."""
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class TextStream:
    """Turns committed tokens into text and finds where the text ends.

    Tokens are looked at one by one, so that the result does not depend on how many a step commits.
    """

    def __init__(self, params: SamplingParams, tokenizer: TextTokenizer) -> None:
        hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._params = params
        self._eos_ids = frozenset[int]() if params.ignore_eos else tokenizer.eos_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer.token_bytes, hidden)
        self._stops = StopMatcher(params.stop, include_match=params.include_stop_str_in_output)
        self._num_output = 0

    def push(self, token_ids: tuple[int, ...]) -> TextStep:
        """Take newly committed tokens, the oldest first."""
        text: list[str] = []
        for index, token_id in enumerate(token_ids):
            if self._num_output >= self._params.max_tokens:
                return TextStep(index, "".join([*text, self._flush()]), FinishReason.LENGTH)
            self._num_output += 1
            ends = token_id in self._eos_ids
            if ends or token_id in self._params.stop_token_ids:
                text.append(self._flush())
                reason = None if ends else token_id
                return TextStep(index + 1, "".join(text), FinishReason.STOP, reason)
            text.append(self._stops.push(self._detokenizer.push(token_id)))
            if self._stops.matched is not None:
                return TextStep(index + 1, "".join(text), FinishReason.STOP, self._stops.matched)
        if self._num_output >= self._params.max_tokens:
            text.append(self._flush())
            return TextStep(len(token_ids), "".join(text), FinishReason.LENGTH)
        return TextStep(len(token_ids), "".join(text))

    def _flush(self) -> str:
        rest = self._stops.push(self._detokenizer.finish())
        return rest + self._stops.finish()
