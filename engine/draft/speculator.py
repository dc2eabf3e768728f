"""Speculator: asks the drafters the policy chooses, and keeps account of what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.draft.acceptance import MAX_POSITIONS
from engine.draft.decision import PLAIN, DraftDecision, DraftOption, DraftOutcome, RequestOptions
from engine.draft.drafter import NO_DRAFT, Draft, Drafter, DraftRequest
from engine.draft.faults import DrafterFaults
from engine.draft.policy import Policy
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

    def propose(self, running: Sequence[TokenSequence], prompt_rows: int) -> dict[str, Proposal]:
        """Drafts by request id.

        Args:
            running: all running sequences; those still computing their prompt are only prepared.
            prompt_rows: rows of prompts that the coming step computes.
        """
        drafters = [d for d in self.drafters if not self._faults.rests(d.name)]
        if not drafters or self._faults.rests(_POLICY):
            return {}
        with self._guarded():
            proposals = self._propose(drafters, running, prompt_rows)
            self._faults.record_success(_POLICY)
            return proposals
        return {}

    def _propose(
        self, drafters: Sequence[Drafter], running: Sequence[TokenSequence], prompt_rows: int
    ) -> dict[str, Proposal]:
        self._prepare(drafters, running)
        decoding = [s for s in running if s.is_decoding and self._limit(s) > 0]
        if not decoding:
            return {}
        free = {d.name: self._ask_free(d, decoding) for d in drafters if d.model is None}
        requests = [self._options(s, drafters, free) for s in decoding]
        decisions = self._policy.choose(requests, prompt_rows)
        modelled = {
            d.name: self._ask_model(d, decoding, decisions) for d in drafters if d.model is not None
        }
        proposals = {}
        for request, decision in zip(requests, decisions, strict=True):
            proposal = self._proposal(request, decision, free | modelled)
            if proposal is not None:
                proposals[request.request_id] = proposal
        return proposals

    def record(
        self, request_id: str, proposal: Proposal, num_drafted: int, num_accepted: int
    ) -> None:
        """Account for a verified draft, of which the scheduler may have cut some tokens."""
        self.metrics[proposal.drafter].record(num_drafted, num_accepted)
        self._faults.record_success(proposal.drafter)
        self.metrics[proposal.drafter].works = True
        outcome = DraftOutcome(
            request_id, proposal.drafter, proposal.draft.acceptance_class, num_drafted, num_accepted
        )
        with self._guarded():
            self._policy.record(outcome)

    def record_failure(self, drafters: Iterable[str]) -> None:
        """Count a failure of the drafters with whose drafts the target's pass raised."""
        for name in drafters:
            self._count_failure(name, DraftError("the target can't compute its drafts"))

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
            self._faults.record_failure(_POLICY, error)

    def _forget(self, drafter: Drafter, request_id: str) -> None:
        try:
            drafter.forget(request_id)
        except ANY_FAULT as error:
            self._count_failure(drafter.name, error)

    def warm_up(self) -> None:
        """Let the draft models make their first passes, so that their costs are known."""
        for drafter in self.drafters:
            drafter.warm_up()

    def state(self) -> dict[str, Any]:
        """The policy's estimates and decisions, JSON types only."""
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
            if drafter.model is not None:
                requests = [self._options(s, [drafter], {}) for s in worthwhile]
                wanted = self._policy.wants_prepared(requests, len(running))
                worthwhile = [s for s, yes in zip(worthwhile, wanted, strict=True) if yes]
            if worthwhile:
                try:
                    with self._timed(drafter):
                        drafter.prepare(worthwhile)
                except ANY_FAULT as error:
                    self._give_up(drafter, worthwhile, error)

    def _ask_free(self, drafter: Drafter, decoding: Sequence[TokenSequence]) -> dict[str, Draft]:
        asked = [s for s in decoding if self._allows(s, drafter) and drafter.can_draft(s)]
        return self._ask(drafter, [DraftRequest(s, self._limit(s)) for s in asked])

    def _ask_model(
        self,
        drafter: Drafter,
        decoding: Sequence[TokenSequence],
        decisions: Sequence[DraftDecision],
    ) -> dict[str, Draft]:
        return self._ask(
            drafter,
            [
                DraftRequest(sequence, decision.length, decision.min_confidence)
                for sequence, decision in zip(decoding, decisions, strict=True)
                if decision.drafter == drafter.name
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
        self._count_failure(drafter.name, error)
        for sequence in sequences:
            self._forget(drafter, sequence.request_id)
            self._policy.record(DraftOutcome(sequence.request_id, drafter.name, 0, 1, 0))

    def _count_failure(self, drafter: str, error: BaseException) -> None:
        self._faults.record_failure(drafter, error)
        self.metrics[drafter].failures += 1
        self.metrics[drafter].works = self._faults.works(drafter)

    def _options(
        self,
        sequence: TokenSequence,
        drafters: Sequence[Drafter],
        free: dict[str, dict[str, Draft]],
    ) -> RequestOptions:
        options = []
        for drafter in drafters:
            if drafter.model is None:
                draft = free[drafter.name].get(sequence.request_id, NO_DRAFT)
                if draft.token_ids:
                    options.append(
                        DraftOption(drafter.name, len(draft.token_ids), draft.acceptance_class)
                    )
            elif self._allows(sequence, drafter) and drafter.can_draft(sequence):
                num_uncomputed = drafter.num_uncomputed_tokens(sequence)
                limit = self._limit(sequence)
                options.append(
                    DraftOption(drafter.name, limit, num_uncomputed_tokens=num_uncomputed)
                )
        return RequestOptions(sequence.request_id, tuple(options), sequence.num_output_left)

    @staticmethod
    def _proposal(
        request: RequestOptions, decision: DraftDecision, drafts: dict[str, dict[str, Draft]]
    ) -> Proposal | None:
        """The chosen draft; when that came out empty, the first other one there is."""
        if decision == PLAIN or decision.drafter is None:
            return None
        for name in (decision.drafter, *(option.drafter for option in request.options)):
            draft = drafts[name].get(request.request_id, NO_DRAFT)
            if draft.token_ids:
                return Proposal(
                    name, Draft(draft.token_ids[: decision.length], draft.acceptance_class)
                )
        return None
