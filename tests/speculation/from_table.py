"""Drafters as an engine makes them, over a test's own models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from engine.config import SpeculationConfig
from engine.draft.draft_model import DraftModel
from engine.draft.drafter import Drafter, DrafterResources, LoadedDraft
from engine.draft.table import DRAFTERS, DraftModelKey
from engine.sampling.grammar import Grammars


def make_from_table(
    names: Iterable[str],
    tokenizer: Any,
    load: Callable[[DraftModelKey], tuple[DraftModel, Any]],
    *,
    grammars: Grammars | None = None,
    **speculation: Any,
) -> list[Drafter]:
    """
    Args:
        tokenizer: the target's.
        load: the draft model under a configuration key, and its tokenizer.
        grammars: the target's.
        speculation: settings other than the default ones.
    """
    if grammars is None:
        grammars = Grammars(tokenizer, len(tokenizer.token_bytes))
    drafters = []
    for entry in (DRAFTERS[name] for name in names):
        draft = None if entry.model_key is None else LoadedDraft(*load(entry.model_key))
        settings = SpeculationConfig(**speculation)
        drafters.append(entry.make(DrafterResources(settings, tokenizer, grammars, draft)))
    return drafters
