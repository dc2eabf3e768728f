"""EngineSummary: facts about a loaded engine that a person wants to read when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.request import SamplingDefaults


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One loaded model and its KV cache."""

    architecture: str
    num_parameters: int
    weight_bytes: int
    """Memory the weights take."""
    weight_format: str
    """Number format of most weights."""
    device: str
    kernels: str
    """What computes the forward pass: a variant of the native kernels, or torch."""
    threads: int | None
    """CPU threads of the forward pass; None: it does not run on a CPU."""
    kv_tokens: int
    """Tokens that fit the KV cache."""
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class EngineSummary:
    name: str
    target: ModelSummary
    drafts: Mapping[str, ModelSummary]
    """Draft models by the name of their drafter."""
    drafters: tuple[str, ...]
    """In order of preference."""
    max_context: int
    """Tokens of one request, prompt and output."""
    sampling_defaults: SamplingDefaults
    has_chat_template: bool

    def requests_that_fit(self, num_tokens: int) -> int:
        """Requests of so many tokens that can run at once, without sharing any prefix."""
        return self.target.kv_tokens // num_tokens
