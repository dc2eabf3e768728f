"""predicted: proposes the text that the client predicts (OpenAI's Predicted Outputs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.draft.drafter import NO_DRAFT, Draft, DrafterResources, DraftRequest, FreeDrafter
from engine.draft.token_index import Ngram, TokenIndex, suffixes
from engine.request import GenerationRequest
from engine.scheduling.sequence import TokenSequence

_LONGEST_ANCHOR = 8
_SHORTEST_ANCHOR = 2


@dataclass(frozen=True, slots=True)
class Prediction:
    """A request's prediction, and where each possible anchor is in it."""

    token_ids: tuple[int, ...]
    anchors: TokenIndex


@dataclass(slots=True)
class _Reader:
    prediction: Prediction
    position: int = 0
    """Where the output stands in the prediction."""
    num_followed: int = 0
    aligned: bool = True


class PredictedDrafter(FreeDrafter):
    """Follows the output through the prediction; finds its place again after a divergence.

    After a divergence the place is where the output's last tokens, as many as possible, occur in
    the prediction; an occurrence behind the old place wins over one before it.
    """

    name = "predicted"

    def __init__(self) -> None:
        self._readers: dict[str, _Reader] = {}

    @classmethod
    def create(cls, resources: DrafterResources) -> PredictedDrafter:
        return cls()

    def preprocess(
        self, request: GenerationRequest, prediction_ids: Sequence[int]
    ) -> Prediction | None:
        if not prediction_ids:
            return None
        anchors = TokenIndex(prediction_ids, range(_SHORTEST_ANCHOR, _LONGEST_ANCHOR + 1))
        return Prediction(tuple(prediction_ids), anchors)

    def can_draft(self, sequence: TokenSequence) -> bool:
        return sequence.preparation.drafts[self.name] is not None

    def forget(self, request_id: str) -> None:
        self._readers.pop(request_id, None)

    def propose_one(self, request: DraftRequest) -> Draft:
        if not self.can_draft(request.sequence):
            return NO_DRAFT
        reader = self._reader(request.sequence)
        _follow(reader, request.sequence)
        if not reader.aligned:
            return NO_DRAFT
        start = reader.position
        return Draft(reader.prediction.token_ids[start : start + request.max_tokens])

    def _reader(self, sequence: TokenSequence) -> _Reader:
        reader = self._readers.get(sequence.request_id)
        if reader is None:
            reader = _Reader(sequence.preparation.drafts[self.name])
            self._readers[sequence.request_id] = reader
        return reader


def _follow(reader: _Reader, sequence: TokenSequence) -> None:
    token_ids = reader.prediction.token_ids
    for token_id in sequence.token_ids[sequence.num_prompt + reader.num_followed :]:
        rest = token_ids[reader.position : reader.position + 1]
        reader.aligned = reader.aligned and rest == (token_id,)
        if reader.aligned:
            reader.position += 1
    reader.num_followed = sequence.num_output
    if not reader.aligned:
        longest = min(_LONGEST_ANCHOR, sequence.num_output)
        lengths = range(_SHORTEST_ANCHOR, longest + 1)
        place = _find_place(reader, suffixes(sequence.token_ids, lengths))
        if place is not None:
            reader.position, reader.aligned = place, True


def _find_place(reader: _Reader, anchors: Sequence[Ngram]) -> int | None:
    """Behind the first anchor, of those that end the output; see `PredictedDrafter`."""
    for anchor in anchors:
        places = reader.prediction.anchors.ends(anchor)
        if len(places):
            following = int(places.searchsorted(reader.position))
            return int(places[min(following, len(places) - 1)])
    return None
