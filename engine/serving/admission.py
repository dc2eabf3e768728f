"""ModelLimits: checks that only the loaded model can make, before a request enters the queue."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import CONTEXT_LENGTH_EXCEEDED, GenerationRequest, RequestError


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What one request may ask of the loaded model."""

    max_context: int
    """Prompt and output tokens together."""
    vocab_size: int
    context_cut_by: str | None = None
    """The configuration key that leaves less context than the model itself has."""

    def check(self, request: GenerationRequest) -> None:
        """Raise `RequestError` unless the model can serve the request."""
        prompt = request.prompt_token_ids
        params = request.params
        if not prompt:
            raise RequestError(
                "The prompt is empty: it must hold at least one token.", param="prompt"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise RequestError(
                f"Prompt token ids must lie between 0 and {self.vocab_size - 1}.", param="prompt"
            )
        if len(prompt) + max(1, params.max_tokens) > self.max_context:
            raise self._context_error(len(prompt), params.max_tokens)
        if request.grammar is not None and params.ignore_eos:
            raise RequestError(
                "ignore_eos can't be combined with structured output, which ends where it is "
                "complete.",
                param="ignore_eos",
            )
        for param, token_ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token_id in token_ids:
                if not 0 <= token_id < self.vocab_size:
                    raise RequestError(
                        f"{param} names token {token_id}, but ids end at {self.vocab_size - 1}.",
                        param=param,
                    )

    def _context_error(self, num_prompt: int, max_tokens: int) -> RequestError:
        cut = "" if self.context_cut_by is None else f" (cut short by '{self.context_cut_by}')"
        maximum = f"This model's maximum context length is {self.max_context} tokens{cut}"
        if num_prompt >= self.max_context:
            return RequestError(
                f"{maximum}, but the prompt has {num_prompt}, which leaves none for the "
                "completion.",
                param="prompt",
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        return RequestError(
            f"{maximum}, but {num_prompt} prompt tokens and max_tokens={max_tokens} need "
            f"{num_prompt + max_tokens}.",
            param="max_tokens",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
