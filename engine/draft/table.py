"""The one place to add a drafter: its row here, beside the file that it is written in.

Drafters are named by where they are, not imported: the configuration reads this table and must not
load torch. (The layout of model registries and of Python's entry points.)
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from engine.draft.drafter import Drafter, DrafterResources

DrafterName = Literal["grammar", "predicted", "ngram", "model", "universal"]
"""What the configuration allows; the keys of `DRAFTERS`, in the same order."""
DraftModelKey = Literal["draft", "model_draft"]
"""Configuration keys that name a draft model."""


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """One drafter."""

    factory: str
    """MODULE:OBJECT, called with the engine's `DrafterResources`."""
    proposes: str
    """For people, as is all that follows."""
    good_for: str
    needs: str = "nothing"
    model_key: DraftModelKey | None = None
    """The key that names its draft model, if it needs one; unset, it is left out."""

    def make(self, resources: DrafterResources) -> Drafter:
        """A drafter without a past.

        Raises:
            ConfigError: it can't be made of this draft model.
        """
        factory = cast("Callable[[DrafterResources], Drafter]", pkgutil.resolve_name(self.factory))
        return factory(resources)


DRAFTERS: Mapping[str, DrafterEntry] = {
    "grammar": DrafterEntry(
        "engine.draft.grammar:GrammarDrafter.create",
        proposes="tokens that the request's grammar or schema forces",
        good_for="structured output",
    ),
    "predicted": DrafterEntry(
        "engine.draft.predicted:PredictedDrafter.create",
        proposes="the text in the request's `prediction`",
        good_for="edits of a given text",
        needs="a client that knows what comes",
    ),
    "ngram": DrafterEntry(
        "engine.draft.ngram:NgramDrafter.create",
        proposes="what followed the same words before, in prompt and answer",
        good_for="summaries, edits, code, retrieval",
    ),
    "model": DrafterEntry(
        "engine.draft.same_vocabulary:SameVocabularyDrafter.create",
        proposes="a draft model with the target's vocabulary",
        good_for="fresh text, draft of the same family",
        model_key="model_draft",
    ),
    "universal": DrafterEntry(
        "engine.draft.universal:UniversalDrafter.create",
        proposes="a draft model with any tokenizer, matched on text",
        good_for="fresh text, no small model in the family",
        model_key="draft",
    ),
}
"""In order of preference."""
