"""Examines a pair of models on this machine: does drafting pay, how far, and if not, why not."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from engine.doctor.acceptance import DRAFT_LENGTH, Acceptance, measure_acceptance
from engine.doctor.divergence import Answer, measure_divergence
from engine.doctor.pair import ModelPair
from engine.doctor.report import Costs, Report
from engine.models.runner import ModelRunner
from engine.models.warm_up import time_passes
from engine.request import ChatPrompt, TextPrompt
from engine.text.alignment import overlap

TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
COMPARED_TEMPERATURES = (0.7, 1.0)
_ROWS = range(1, DRAFT_LENGTH + 2)
_ROUNDS = 5


def examine(
    pair: ModelPair,
    sources: Sequence[ChatPrompt | TextPrompt],
    *,
    max_tokens: int,
    compare_argmax: bool = False,
    on_progress: Callable[[str], None],
) -> Report:
    """Measure everything.

    Args:
        sources: prompts like those to be served; chats need a target with a template.
        max_tokens: of each answer.
        compare_argmax: also measure drafts of the likeliest tokens at temperatures above 0.
        on_progress: told what comes next, before each of `num_stages`.

    Raises:
        RequestError: a prompt that the target can't take.
    """

    def measure(
        sources: Sequence[ChatPrompt | TextPrompt], temperature: float = 0.0, **options: bool
    ) -> tuple[Acceptance, list[Answer]]:
        return measure_acceptance(
            pair, sources, temperature=temperature, max_tokens=max_tokens, **options
        )

    chats = [source for source in sources if isinstance(source, ChatPrompt)]
    on_progress("acceptance at temperature 0")
    of_chats, answers = measure(chats)
    of_texts, text_answers = measure([s for s in sources if isinstance(s, TextPrompt)])
    coupled = [of_chats + of_texts]
    for temperature in TEMPERATURES[1:]:
        on_progress(f"acceptance at temperature {temperature:g}")
        coupled.append(measure(sources, temperature)[0])
    argmax = []
    for temperature in COMPARED_TEMPERATURES if compare_argmax else ():
        on_progress(f"likeliest tokens as drafts at temperature {temperature:g}")
        argmax.append(measure(sources, temperature, argmax_drafts=True)[0])
    of_raw_text = None
    if chats:
        on_progress("acceptance without a template")
        of_raw_text, _ = measure([TextPrompt(str(c.messages[-1]["content"])) for c in chats])
    # From here on the runners' KV memory is used directly; nothing may be drafted any more.
    on_progress("divergence")
    divergence = measure_divergence(pair, answers + text_answers)
    on_progress("costs")
    return Report(
        target=pair.parts.model_name,
        draft=pair.draft_name,
        drafter=pair.drafter.name,
        vocabulary_overlap=overlap(pair.draft_tokenizer, pair.parts.tokenizer),
        divergence=divergence,
        acceptance=tuple(coupled),
        argmax_acceptance=tuple(argmax),
        raw_text_acceptance=of_raw_text,
        chat_acceptance=of_chats if chats else None,
        costs=Costs(_pass_ms(pair.target), _pass_ms(pair.draft)),
    )


def num_stages(sources: Sequence[ChatPrompt | TextPrompt], *, compare_argmax: bool) -> int:
    """How often `examine` calls `on_progress`."""
    has_chats = any(isinstance(source, ChatPrompt) for source in sources)
    compared = len(COMPARED_TEMPERATURES) if compare_argmax else 0
    return len(TEMPERATURES) + compared + has_chats + 2


def _pass_ms(runner: ModelRunner) -> dict[int, float]:
    """All row counts take turns in each round, so that a slow moment meets them all."""
    times = defaultdict(list)
    for _ in range(_ROUNDS):
        for rows, seconds in time_passes(runner, _ROWS):
            times[rows].append(1e3 * seconds)
    return {rows: statistics.median(samples) for rows, samples in times.items()}
