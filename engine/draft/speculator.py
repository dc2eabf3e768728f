"""Speculator: asks the drafters the policy chooses, and keeps account of what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.draft.acceptance import MAX_POSITIONS
from engine.draft.drafter import NO_DRAFT, Draft, Drafter, DraftRequest
from engine.draft.faults import DrafterFaults
from engine.draft.policy import PLAIN, Candidate, Choice, Option, Policy
from engine.fault import ANY_FAULT
from engine.figures import DrafterMetrics
from engine.scheduling.sequence import TokenSequence

_POLICY = "policy"
"""Under this name a fault is kept that is no drafter's."""


class DraftError(RuntimeError):
    """The target's pass raises with a draft and does not without it."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft for one request and who made it."""

    drafter: str
    draft: Draft


class Speculator:
    """The engine's one door to speculation."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        policy: Policy,
        *,
        max_length: int = MAX_POSITIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            drafters: in order of preference, each under a name of its own.
            max_length: longest draft of any drafter, in target tokens.
            clock: monotonic seconds; a drafter that fails rests for some.
        """
        self.drafters = tuple(drafters)
        self.metrics = {drafter.name: DrafterMetrics() for drafter in drafters}
        self._policy = policy
        self._faults = DrafterFaults([*self.metrics, _POLICY], clock)
        self._max_length = min(max_length, MAX_POSITIONS)

    def propose(self, running: Sequence[TokenSequence], other_rows: int) -> dict[str, Proposal]:
        """Drafts by request id.

        Args:
            running: all running sequences; those still computing their prompt are only prepared.
            other_rows: prompt rows the coming step computes.
        """
        drafters = [d for d in self.drafters if not self._faults.rests(d.name)]
        if not drafters or self._faults.rests(_POLICY):
            return {}
        with self._guarded():
            proposals = self._propose(drafters, running, other_rows)
            self._faults.clear(_POLICY)
            return proposals
        return {}

    def _propose(
        self, drafters: Sequence[Drafter], running: Sequence[TokenSequence], other_rows: int
    ) -> dict[str, Proposal]:
        self._prepare(drafters, running)
        decoding = [s for s in running if s.is_decoding and self._limit(s) > 0]
        if not decoding:
            return {}
        free = {d.name: self._ask_free(d, decoding) for d in drafters if d.cost is None}
        candidates = [self._candidate(s, drafters, free) for s in decoding]
        choices = self._policy.choose(candidates, other_rows)
        modelled = {
            d.name: self._ask_model(d, decoding, choices) for d in drafters if d.cost is not None
        }
        proposals = {}
        for sequence, candidate, choice in zip(decoding, candidates, choices, strict=True):
            proposal = self._proposal(sequence.request_id, candidate, choice, free | modelled)
            if proposal is not None:
                proposals[sequence.request_id] = proposal
        return proposals

    def record(
        self, request_id: str, proposal: Proposal, num_drafted: int, num_accepted: int
    ) -> None:
        """Account for a verified draft, of which the scheduler may have cut some tokens."""
        self.metrics[proposal.drafter].record(num_drafted, num_accepted)
        self._faults.clear(proposal.drafter)
        self.metrics[proposal.drafter].works = True
        with self._guarded():
            self._policy.record(
                request_id, proposal.drafter, proposal.draft.grade, num_drafted, num_accepted
            )

    def blame(self, drafters: Iterable[str]) -> None:
        """Count a failure of the drafters with whose drafts the target's pass raised."""
        for name in drafters:
            self._note_failure(name, DraftError("the target can't compute its drafts"))

    def plain_seconds(self, num_requests: int) -> float:
        """What a step without drafts costs that decodes so many requests, by the measured steps."""
        return self._policy.plain_seconds(num_requests)

    def observe_step(self, rows: int, seconds: float) -> None:
        """Learn what a step of the target cost."""
        with self._guarded():
            self._policy.observe_step(rows, seconds)

    def forget(self, request_id: str) -> None:
        for drafter in self.drafters:
            self._forget(drafter, request_id)
        with self._guarded():
            self._policy.forget(request_id)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A fault of the policy costs drafts, never a request."""
        try:
            yield
        except ANY_FAULT as error:
            self._faults.note(_POLICY, error)

    def _forget(self, drafter: Drafter, request_id: str) -> None:
        try:
            drafter.forget(request_id)
        except ANY_FAULT as error:
            self._note_failure(drafter.name, error)

    def warm_up(self) -> None:
        """Let the draft models make their first passes, so that their costs are known."""
        for drafter in self.drafters:
            drafter.warm_up()

    def state(self) -> dict[str, Any]:
        """The policy's estimates and choices, JSON types only."""
        return {
            "drafters": [d.name for d in self.drafters],
            "failing": self._faults.state(),
            **self._policy.state(),
        }

    def _limit(self, sequence: TokenSequence) -> int:
        asked = sequence.request.speculation.max_draft_tokens
        limit = self._max_length if asked is None else min(asked, self._max_length)
        return min(limit, sequence.num_output_left - 1)

    @staticmethod
    def _allows(sequence: TokenSequence, drafter: Drafter) -> bool:
        return drafter.name in sequence.preparation.drafts

    def _prepare(self, drafters: Sequence[Drafter], running: Sequence[TokenSequence]) -> None:
        prefilling = [s for s in running if not s.is_decoding]
        for drafter in drafters if prefilling else ():
            worthwhile = [
                s for s in prefilling if self._allows(s, drafter) and drafter.can_draft(s)
            ]
            if drafter.cost is not None:
                candidates = [self._model_candidate(s, drafter) for s in worthwhile]
                wanted = self._policy.wants_prepared(candidates, len(running))
                worthwhile = [s for s, yes in zip(worthwhile, wanted, strict=True) if yes]
            if worthwhile:
                try:
                    with self._timed(drafter):
                        drafter.prepare(worthwhile)
                except ANY_FAULT as error:
                    self._give_up(drafter, worthwhile, error)

    def _model_candidate(self, sequence: TokenSequence, drafter: Drafter) -> Candidate:
        return Candidate(
            sequence.request_id,
            (self._model_option(sequence, drafter),),
            num_left=sequence.num_output_left,
        )

    def _model_option(self, sequence: TokenSequence, drafter: Drafter) -> Option:
        return Option(drafter.name, self._limit(sequence), backlog=drafter.backlog(sequence))

    def _ask_free(self, drafter: Drafter, decoding: Sequence[TokenSequence]) -> dict[str, Draft]:
        asked = [s for s in decoding if self._allows(s, drafter) and drafter.can_draft(s)]
        return self._ask(drafter, [DraftRequest(s, self._limit(s)) for s in asked])

    def _ask_model(
        self, drafter: Drafter, decoding: Sequence[TokenSequence], choices: Sequence[Choice]
    ) -> dict[str, Draft]:
        return self._ask(
            drafter,
            [
                DraftRequest(sequence, choice.length, choice.least_certainty)
                for sequence, choice in zip(decoding, choices, strict=True)
                if choice.drafter == drafter.name
            ],
        )

    def _ask(self, drafter: Drafter, requests: list[DraftRequest]) -> dict[str, Draft]:
        """Drafts by request id; a drafter that raises costs the step its drafts, nothing more."""
        if not requests:
            return {}
        sequences = [request.sequence for request in requests]
        try:
            with self._timed(drafter):
                drafts = drafter.propose(requests)
            return {s.request_id: draft for s, draft in zip(sequences, drafts, strict=True)}
        except ANY_FAULT as error:
            self._give_up(drafter, sequences, error)
            return {}

    @contextmanager
    def _timed(self, drafter: Drafter) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.metrics[drafter.name].seconds += time.perf_counter() - started

    def _give_up(
        self, drafter: Drafter, sequences: Sequence[TokenSequence], error: BaseException
    ) -> None:
        """Go on without the drafts that a drafter failed to make."""
        self._note_failure(drafter.name, error)
        for sequence in sequences:
            self._forget(drafter, sequence.request_id)
            self._policy.record(sequence.request_id, drafter.name, 0, 1, 0)

    def _note_failure(self, drafter: str, error: BaseException) -> None:
        self._faults.note(drafter, error)
        self.metrics[drafter].failures += 1
        self.metrics[drafter].works = self._faults.works(drafter)

    def _candidate(
        self,
        sequence: TokenSequence,
        drafters: Sequence[Drafter],
        free: dict[str, dict[str, Draft]],
    ) -> Candidate:
        options = []
        for drafter in drafters:
            if drafter.cost is None:
                draft = free[drafter.name].get(sequence.request_id, NO_DRAFT)
                if draft.token_ids:
                    options.append(Option(drafter.name, len(draft.token_ids), draft.grade))
            elif self._allows(sequence, drafter) and drafter.can_draft(sequence):
                options.append(self._model_option(sequence, drafter))
        return Candidate(sequence.request_id, tuple(options), sequence.num_output_left)

    @staticmethod
    def _proposal(
        request_id: str,
        candidate: Candidate,
        choice: Choice,
        drafts: dict[str, dict[str, Draft]],
    ) -> Proposal | None:
        """The chosen draft; when that came out empty, the first other one there is."""
        if choice == PLAIN or choice.drafter is None:
            return None
        for name in (choice.drafter, *(option.drafter for option in candidate.options)):
            draft = drafts[name].get(request_id, NO_DRAFT)
            if draft.token_ids:
                return Proposal(name, Draft(draft.token_ids[: choice.length], draft.grade))
        return None
