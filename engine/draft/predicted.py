"""predicted: proposes the text that the client predicts (OpenAI's Predicted Outputs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.draft.drafter import NO_DRAFT, Draft, DraftRequest
from engine.sequence import TokenSequence
from engine.text.tokenizer import TextTokenizer

_LONGEST_ANCHOR = 8
_SHORTEST_ANCHOR = 2


@dataclass(slots=True)
class _Prediction:
    token_ids: list[int]
    anchors: dict[tuple[int, ...], list[int]]
    """Positions behind each n-gram, ascending, for every anchor length."""
    position: int = 0
    """Where the output stands in the prediction."""
    num_followed: int = 0
    aligned: bool = True


class PredictedDrafter:
    """Follows the output through the prediction; finds its place again after a divergence.

    After a divergence the place is where the output's last tokens, as many as possible, occur in
    the prediction; an occurrence behind the old place wins over one before it.
    """

    name = "predicted"
    cost = None

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._predictions: dict[str, _Prediction] = {}

    def warm_up(self) -> None: ...

    def backlog(self, sequence: TokenSequence) -> int:
        return 0

    def can_draft(self, sequence: TokenSequence) -> bool:
        return bool(sequence.request.prediction)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            if self.can_draft(sequence):
                self._prediction(sequence)

    def forget(self, request_id: str) -> None:
        self._predictions.pop(request_id, None)

    def _propose(self, request: DraftRequest) -> Draft:
        if not self.can_draft(request.sequence):
            return NO_DRAFT
        prediction = self._prediction(request.sequence)
        self._follow(prediction, request.sequence)
        if not prediction.aligned:
            return NO_DRAFT
        start = prediction.position
        return Draft(tuple(prediction.token_ids[start : start + request.max_tokens]))

    def _prediction(self, sequence: TokenSequence) -> _Prediction:
        prediction = self._predictions.get(sequence.request_id)
        if prediction is None:
            token_ids = self._tokenizer.encode_plain(sequence.request.prediction or "")
            prediction = _Prediction(token_ids, _anchors(token_ids))
            self._predictions[sequence.request_id] = prediction
        return prediction

    def _follow(self, prediction: _Prediction, sequence: TokenSequence) -> None:
        output = sequence.token_ids[sequence.num_prompt :]
        for token_id in output[prediction.num_followed :]:
            rest = prediction.token_ids[prediction.position : prediction.position + 1]
            prediction.aligned = prediction.aligned and rest == [token_id]
            if prediction.aligned:
                prediction.position += 1
        prediction.num_followed = len(output)
        if not prediction.aligned:
            place = _find_place(prediction, output)
            if place is not None:
                prediction.position, prediction.aligned = place, True


def _anchors(token_ids: list[int]) -> dict[tuple[int, ...], list[int]]:
    anchors: dict[tuple[int, ...], list[int]] = {}
    for length in range(_SHORTEST_ANCHOR, _LONGEST_ANCHOR + 1):
        for end in range(length, len(token_ids) + 1):
            anchors.setdefault(tuple(token_ids[end - length : end]), []).append(end)
    return anchors


def _find_place(prediction: _Prediction, output: list[int]) -> int | None:
    for length in range(min(_LONGEST_ANCHOR, len(output)), _SHORTEST_ANCHOR - 1, -1):
        places = prediction.anchors.get(tuple(output[-length:]))
        if places:
            return next((place for place in places if place >= prediction.position), places[-1])
    return None
