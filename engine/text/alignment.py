"""Which tokens of two vocabularies are the same text."""

from __future__ import annotations

from engine.text.tokenizer import TextTokenizer


def aligned_ids(draft: TextTokenizer, target: TextTokenizer) -> list[int | None]:
    """For each draft id the target id of the same bytes, or None.

    Control tokens match by what they are written as; the ends of turn and text match each other.
    """
    plain: dict[bytes, int] = {}
    control: dict[bytes, int] = {}
    for token_id, piece in enumerate(target.token_bytes):
        if piece:
            table = control if token_id in target.special_ids else plain
            table.setdefault(piece, token_id)
    ids: list[int | None] = [
        (control if token_id in draft.special_ids else plain).get(piece)
        for token_id, piece in enumerate(draft.token_bytes)
    ]
    for ours, theirs in (
        (draft.end_of_text_id, target.end_of_text_id),
        (draft.end_of_turn_id, target.end_of_turn_id),
    ):
        if ours is not None and theirs is not None:
            ids[ours] = theirs
    return ids


def overlap(draft: TextTokenizer, target: TextTokenizer) -> float:
    """Share of the draft's tokens that the target has too, 0 to 1."""
    ids = aligned_ids(draft, target)
    return sum(i is not None for i in ids) / max(1, len(ids))
