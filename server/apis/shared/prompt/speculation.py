"""From a request's speculation fields to the engine's parameters."""

from __future__ import annotations

from collections.abc import Collection

from engine.request import RequestError, SpeculationParams
from server.apis.shared.schema.sampling import SamplingFields
from server.apis.shared.schema.speculation import AcceptanceOptions, SpeculationOptions

_MODES = ("auto", "off")
_CHARACTERS_PER_CONTEXT_TOKEN = 16
"""A prediction much longer than any possible output is only a burden."""


def speculation_params(fields: SamplingFields, drafters: Collection[str]) -> SpeculationParams:
    """
    Args:
        drafters: names of the loaded drafters.

    Raises:
        RequestError: a drafter that is not loaded, or two acceptance rules that differ.
    """
    options = fields.speculation or SpeculationOptions()
    mode = options.mode or "auto"
    if mode not in (*_MODES, *drafters):
        loaded = ", ".join(drafters) or "none"
        raise RequestError(
            f"'speculation.mode' must be 'auto', 'off' or a loaded drafter (loaded: {loaded}), "
            f"not {mode[:64]!r}.",
            param="speculation.mode",
        )
    inner = _accept_top_k(options.acceptance, "speculation.acceptance")
    outer = _accept_top_k(fields.acceptance, "acceptance")
    if None not in (options.acceptance, fields.acceptance) and inner != outer:
        raise RequestError(
            "'acceptance' and 'speculation.acceptance' differ; set only one of them.",
            param="acceptance",
        )
    return SpeculationParams(
        mode=mode, max_draft_tokens=options.max_draft_tokens, accept_top_k=inner or outer
    )


def prediction_text(fields: SamplingFields, max_context: int) -> str | None:
    """The text a client predicts; None for none or an empty one."""
    if fields.prediction is None:
        return None
    text = fields.prediction.text
    limit = _CHARACTERS_PER_CONTEXT_TOKEN * max_context
    if len(text) > limit:
        raise RequestError(
            f"'prediction' has {len(text)} characters; the limit for this model is {limit}.",
            param="prediction",
        )
    return text or None


def _accept_top_k(options: AcceptanceOptions | None, param: str) -> int | None:
    if options is None:
        return None
    if options.mode == "exact":
        if options.k is not None:
            raise RequestError(f"'{param}.k' is only for mode 'top_k'.", param=f"{param}.k")
        return None
    if options.k is None:
        raise RequestError(f"Missing required parameter: '{param}.k'.", param=f"{param}.k")
    return options.k
