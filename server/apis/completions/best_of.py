"""`best_of`: of several candidates a prompt, the likeliest become its choices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.request import RequestOutput
from server.apis.completions.schema import CompletionChoice


class BestOf:
    """Keeps the candidates with the highest mean log-probability a token."""

    def __init__(self, *, num_candidates: int, num_choices: int) -> None:
        """Both numbers are for each prompt."""
        self._num_candidates = num_candidates
        self._num_choices = num_choices
        self._logprobs: dict[int, list[float]] = {}

    def note(self, index: int, output: RequestOutput) -> None:
        """Take an output of a candidate into account; it must carry log-probabilities."""
        self._logprobs.setdefault(index, []).extend(entry.logprob for entry in output.logprobs)

    def choices(self, candidates: Sequence[CompletionChoice]) -> list[CompletionChoice]:
        """The kept ones of all candidates, prompt by prompt, likeliest first."""
        kept = [
            candidates[index]
            for first in range(0, len(candidates), self._num_candidates)
            for index in self._likeliest(range(first, first + self._num_candidates))
        ]
        return [choice.model_copy(update={"index": number}) for number, choice in enumerate(kept)]

    def _likeliest(self, indexes: Iterable[int]) -> list[int]:
        return sorted(indexes, key=self._mean_logprob, reverse=True)[: self._num_choices]

    def _mean_logprob(self, index: int) -> float:
        logprobs = self._logprobs[index]
        return sum(logprobs) / len(logprobs) if logprobs else 0.0
