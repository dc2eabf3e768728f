"""Preparation: what is made of a request before the engine's thread gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.sampling.grammar_compiler import CompiledGrammar


@dataclass(frozen=True, slots=True)
class Preparation:
    """All that takes time in proportion to a request's size, done; never changed again.

    It depends on the prompt, its source, the prediction and the grammar alone: the choices of one
    prompt share it.
    """

    grammar: CompiledGrammar | None = None
    block_hashes: tuple[bytes, ...] = ()
    """Of the prompt's full blocks, for the target's prefix cache."""
    num_prediction_tokens: int = 0
    drafts: Mapping[str, Any] = field(default_factory=dict)
    """What each drafter made of the request (`Drafter.preprocess`), by name; a drafter that the
    request does not want, or that failed on it, is missing and drafts nothing for it."""


NOT_PREPARED = Preparation()
