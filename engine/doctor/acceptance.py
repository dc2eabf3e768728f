"""How many draft tokens the target accepts, by position and by temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from engine.doctor.divergence import Answer
from engine.doctor.pair import ModelPair
from engine.draft.decision import PLAIN, DraftDecision, DraftOutcome, RequestOptions
from engine.draft.drafter import Draft, Drafter, DrafterWrapper, DraftRequest
from engine.draft.policy import FixedPolicy
from engine.request import ChatPrompt, GenerationRequest, SamplingParams, TextPrompt
from engine.scheduling.sequence import TokenSequence

DRAFT_LENGTH = 8
RATE_LENGTH = 5
"""The acceptance rate counts the first so many tokens of a draft."""


@dataclass(slots=True)
class Acceptance:
    """What became of drafts that were all asked to be `DRAFT_LENGTH` long."""

    temperature: float
    asked: int = 0
    """Times a draft was asked for, also in vain."""
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """Drafted and accepted tokens of each draft."""

    def __add__(self, other: Acceptance) -> Acceptance:
        drafts = self.drafts + other.drafts
        return Acceptance(self.temperature, self.asked + other.asked, drafts)

    @property
    def rate(self) -> float:
        """Accepted share of the first `RATE_LENGTH` tokens of the drafts."""
        drafted = sum(min(n, RATE_LENGTH) for n, _ in self.drafts)
        return sum(min(n, RATE_LENGTH) for _, n in self.drafts) / max(1, drafted)

    @property
    def by_position(self) -> list[float]:
        """Chance of each position's token to be accepted when all before it were."""
        rates = []
        for position in range(DRAFT_LENGTH):
            reached = sum(drafted > position <= accepted for drafted, accepted in self.drafts)
            right = sum(accepted > position for _, accepted in self.drafts)
            if not reached:
                break
            rates.append(right / reached)
        return rates

    def tokens_a_pass(self, length: int) -> float:
        """Expected tokens of a target pass when drafts have at most `length` tokens."""
        accepted = sum(min(accepted, length) for _, accepted in self.drafts)
        return 1.0 + accepted / max(1, self.asked)


class _Recorder(FixedPolicy):
    """Always asks for the longest draft, and remembers what came of each."""

    def __init__(self, acceptance: Acceptance) -> None:
        super().__init__(DRAFT_LENGTH)
        self._acceptance = acceptance

    def choose(self, requests: Sequence[RequestOptions], prompt_rows: int) -> list[DraftDecision]:
        decisions = super().choose(requests, prompt_rows)
        self._acceptance.asked += sum(decision != PLAIN for decision in decisions)
        return decisions

    def record(self, outcome: DraftOutcome) -> None:
        self._acceptance.drafts.append((outcome.num_drafted, outcome.num_accepted))


class _ArgmaxDrafter(DrafterWrapper):
    """The pair's drafter without coupling: it drafts its likeliest tokens at any temperature."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return super().propose(
            [
                replace(request, sequence=cast(TokenSequence, _GreedyView(request.sequence)))
                for request in requests
            ]
        )


class _GreedyView:
    """A sequence whose temperature reads 0."""

    def __init__(self, sequence: TokenSequence) -> None:
        self._sequence = sequence
        self.params = replace(sequence.params, temperature=0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sequence, name)


def measure_acceptance(
    pair: ModelPair,
    sources: Sequence[ChatPrompt | TextPrompt],
    *,
    temperature: float,
    max_tokens: int,
    argmax_drafts: bool = False,
) -> tuple[Acceptance, list[Answer]]:
    """Decode prompts under speculation; the target's answers are those of plain decoding.

    Args:
        argmax_drafts: draft the likeliest tokens instead of drawing them with the target's noise.
    """
    acceptance = Acceptance(temperature)
    drafter: Drafter = _ArgmaxDrafter(pair.drafter) if argmax_drafts else pair.drafter
    # No prefix cache: one core follows another, and they share the KV memory.
    core = pair.parts.assemble([drafter], prefix_cache=False, policy=_Recorder(acceptance))
    answers = []
    for seed, source in enumerate(sources):
        prompt = (
            core.tokenizer.encode_chat(source.messages, source.options)
            if isinstance(source, ChatPrompt)
            else core.tokenizer.encode(source.text)
        )
        room = core.limits.max_context - len(prompt)
        params = SamplingParams(min(max_tokens, room), seed, temperature)
        request = GenerationRequest(f"doctor-{seed}", tuple(prompt), params, source)
        core.limits.check(request)
        core.add(request)
        # One at a time: most rows of long drafts are in vain, and in a batch they cost most.
        output = []
        while core.has_work:
            output += [token_id for step in core.step() for token_id in step.token_ids]
        answers.append(Answer(source, request.prompt_token_ids, tuple(output)))
    return acceptance, answers
