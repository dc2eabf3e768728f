"""How far apart the two models' distributions are, on the target's own answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.doctor.pair import ModelPair, logits_behind
from engine.draft.draft_prompt import encode_draft_prompt
from engine.request import ChatPrompt, TextPrompt
from engine.text.alignment import aligned_ids
from engine.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target wrote."""

    source: ChatPrompt | TextPrompt
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """See `measure_divergence`."""

    positions: int
    """Aligned positions compared."""
    mean_nats: float
    median_nats: float
    top1_agreement: float
    """Share of positions where both models' likeliest common token is the same."""


def measure_divergence(pair: ModelPair, answers: Sequence[Answer]) -> Divergence | None:
    """Kullback-Leibler divergence KL(target || draft) over aligned positions, in nats.

    A position of an answer is aligned when a token of both tokenizers begins there and the
    target's next token is one that the draft has too (the same bytes). There the two next-token
    distributions at temperature 1 are compared over the tokens that both vocabularies have, each
    renormalised to sum to 1 over those.

    Returns:
        None when no position is aligned.
    """
    ours, theirs = _common_tokens(pair)
    nats, agreements = [], []
    for answer in answers:
        target_logits, draft_logits = _aligned_logits(pair, answer, set(theirs.tolist()))
        target = target_logits[:, theirs].double().log_softmax(dim=1)
        draft = draft_logits[:, ours].double().log_softmax(dim=1)
        nats += (target.exp() * (target - draft)).sum(dim=1).tolist()
        agreements += (target.argmax(dim=1) == draft.argmax(dim=1)).tolist()
    if not nats:
        return None
    return Divergence(
        positions=len(nats),
        mean_nats=sum(nats) / len(nats),
        median_nats=sorted(nats)[len(nats) // 2],
        top1_agreement=sum(agreements) / len(agreements),
    )


def _common_tokens(pair: ModelPair) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[C] ids of the common tokens in the draft and in the target, no target id twice."""
    pairs: dict[int, int] = {}
    for draft_id, target_id in enumerate(aligned_ids(pair.draft_tokenizer, pair.parts.tokenizer)):
        known = target_id is not None and target_id < pair.target.info.vocab_size
        if target_id is not None and known and draft_id < pair.draft.info.vocab_size:
            pairs.setdefault(target_id, draft_id)
    return torch.tensor(list(pairs.values())), torch.tensor(list(pairs))


def _aligned_logits(
    pair: ModelPair, answer: Answer, common: set[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[P, V] of the target and of the draft at an answer's aligned positions."""
    target, draft = pair.parts.tokenizer, pair.draft_tokenizer
    nothing = (
        torch.empty(0, pair.target.info.vocab_size),
        torch.empty(0, pair.draft.info.vocab_size),
    )
    output = [i for i in answer.output_ids if i not in target.special_ids]
    if pair.shares_vocabulary:
        draft_prompt, draft_output = list(answer.prompt_ids), output
    else:
        draft_prompt = encode_draft_prompt(answer.source, draft)
        encoded = draft.encode_continuation(target.bytes_of(output).decode(errors="replace"))
        if encoded is None:
            return nothing
        draft_output = encoded
    starts = dict(zip(_starts(draft, draft_output), range(len(draft_output)), strict=True))
    positions = [
        (index, starts[offset])
        for index, offset in enumerate(_starts(target, output))
        if offset in starts and output[index] in common
    ]
    draft_ids = draft_prompt + draft_output
    if not positions or not pair.draft_model.has_room(len(draft_ids)):
        return nothing
    chunk = pair.parts.config.scheduler.prefill_chunk
    before_output = len(answer.prompt_ids) - 1
    return (
        logits_behind(
            pair.target,
            [*answer.prompt_ids, *output],
            [before_output + index for index, _ in positions],
            chunk=chunk,
        ),
        logits_behind(
            pair.draft,
            draft_ids,
            [len(draft_prompt) - 1 + index for _, index in positions],
            chunk=chunk,
        ),
    )


def _starts(tokenizer: TextTokenizer, token_ids: Sequence[int]) -> list[int]:
    """Byte offset of each token's beginning."""
    lengths = (len(tokenizer.token_bytes[i]) for i in token_ids)
    return [0, *accumulate(lengths)][: len(token_ids)]
