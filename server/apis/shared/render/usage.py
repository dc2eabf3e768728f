"""When and how OpenAI's older APIs tell token counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from engine.request import RequestError, Usage
from server.apis.shared.schema.sampling import SamplingFields, StreamOptions
from server.apis.shared.schema.usage import (
    CompletionTokensDetails,
    CompletionUsage,
    DrafterUsage,
    PromptTokensDetails,
    SpeculationUsage,
)

_PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class UsageReport:
    at_end: bool
    """Whether a stream ends with a usage chunk."""
    in_chunks: bool = False
    """Whether every chunk tells the counts so far."""
    stats: bool = False
    """Whether usage tells what speculation did."""

    @classmethod
    def of(cls, fields: SamplingFields) -> Self:
        """What a request asks for.

        Raises:
            RequestError: it has options of a stream and asks for none.
        """
        options = fields.stream_options or StreamOptions()
        if fields.stream_options is not None and not fields.stream:
            raise RequestError(
                "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
            )
        return cls(
            at_end=bool(options.include_usage),
            in_chunks=bool(options.include_usage and options.continuous_usage_stats),
            stats=fields.speculation is not None and bool(fields.speculation.stats),
        )

    def body(self, usage: Usage, reasoning_tokens: int = 0) -> CompletionUsage:
        stats = {"speculation": _speculation(usage)} if self.stats else {}
        return CompletionUsage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
            completion_tokens_details=_completion_details(usage, reasoning_tokens),
            **stats,
        )

    def chunk_fields(self, usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
        """The `usage` field of a chunk with content, where it has one."""
        if self.in_chunks:
            return {"usage": self.body(usage, reasoning_tokens)}
        return {"usage": None} if self.at_end else {}


def _completion_details(usage: Usage, reasoning_tokens: int) -> CompletionTokensDetails:
    accepted = sum(draft.accepted for draft in usage.drafts if draft.drafter == _PREDICTED)
    return CompletionTokensDetails(
        reasoning_tokens=reasoning_tokens,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=max(0, usage.prediction_tokens - accepted),
    )


def _speculation(usage: Usage) -> SpeculationUsage:
    return SpeculationUsage(
        target_passes=usage.target_passes,
        drafted_tokens=sum(draft.drafted for draft in usage.drafts),
        accepted_tokens=sum(draft.accepted for draft in usage.drafts),
        by_drafter={
            draft.drafter: DrafterUsage(
                drafted_tokens=draft.drafted, accepted_tokens=draft.accepted
            )
            for draft in usage.drafts
        },
    )
