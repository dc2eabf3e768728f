"""The pair of models under examination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.build import EngineParts, load_parts
from engine.config import Config, ConfigError
from engine.draft.draft_model import DraftModel
from engine.draft.drafter import Drafter
from engine.draft.same_vocabulary import VocabularyMismatchError, check_same_vocabulary
from engine.models.gguf import hf_folder
from engine.models.runner import ModelRunner
from engine.models.source import resolve
from engine.plan import Chunk, StepPlan
from engine.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target and its draft model, loaded."""

    parts: EngineParts
    drafter: Drafter
    draft_model: DraftModel
    """The drafter's."""
    draft_name: str
    draft_tokenizer: TextTokenizer
    shares_vocabulary: bool
    """Whether the draft's tokens are the target's."""

    @property
    def target(self) -> ModelRunner:
        return self.parts.target

    @property
    def draft(self) -> ModelRunner:
        return self.draft_model.runner


def load_pair(config: Config) -> ModelPair:
    """Load the configured target and draft.

    A draft with the target's vocabulary is run by the `model` drafter whichever key names it, any
    other by `universal`.

    Raises:
        ConfigError: no draft is configured, or what `load_parts` raises it for.
        ModelSourceError: see `load_parts`.
        UnsupportedModelError: see `load_parts`.
    """
    reference = config.model_draft or config.draft
    if reference is None:
        raise ConfigError("draft: name the draft model to examine, such as --draft REF")
    files = resolve(reference)
    tokenizer = TextTokenizer.load(hf_folder(files))
    target_tokenizer = TextTokenizer.load(hf_folder(resolve(config.model)))
    same = config.model_draft is not None or _is_same(tokenizer, target_tokenizer)
    changes = {
        "draft": None if same else reference,
        "model_draft": reference if same else None,
        "speculation": config.speculation.model_copy(
            update={"drafters": ("model",) if same else ("universal",)}
        ),
    }
    parts = load_parts(config.model_copy(update=changes))
    ((drafter, model),) = ((d, d.model) for d in parts.drafters if d.model is not None)
    return ModelPair(parts, drafter, model, files.name, tokenizer, shares_vocabulary=same)


def _is_same(draft: TextTokenizer, target: TextTokenizer) -> bool:
    try:
        check_same_vocabulary(draft, target)
    except VocabularyMismatchError:
        return False
    return True


def logits_behind(
    runner: ModelRunner, token_ids: Sequence[int], indexes: Sequence[int], *, chunk: int
) -> torch.Tensor:
    """Logits of the tokens behind some positions of a text.

    Uses the runner's first KV blocks, so nobody may hold them.

    Args:
        token_ids: the text, which fits the runner's KV cache.
        indexes: ascending indexes of tokens.
        chunk: tokens of one forward pass.

    Returns:
        float32[len(indexes), vocab_size], on the CPU.
    """
    wanted = np.asarray(indexes)
    rows = []
    for start in range(0, len(token_ids), chunk):
        ids = np.asarray(token_ids[start : start + chunk], np.int32)
        inside = wanted[(wanted >= start) & (wanted < start + len(ids))] - start
        first = int(inside[0]) if len(inside) else len(ids)
        blocks = tuple(range(-(-(start + len(ids)) // runner.block_size)))
        logits = runner.execute(StepPlan((Chunk("doctor", start, ids, blocks, 0, first),)))
        rows.append(logits[torch.from_numpy(inside - first).to(logits.device)].cpu())
    return torch.cat(rows)
