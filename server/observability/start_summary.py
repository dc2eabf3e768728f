"""The start-up summary: what is served, on what, and how much fits."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from engine.config import Config
from engine.summary import EngineSummary, ModelSummary

logger = logging.getLogger(__name__)

_TYPICAL_TOKENS = (2048, 512)
"""Lengths of requests for which the summary tells how many fit, beside the longest."""


def log_ready(
    summary: EngineSummary, config: Config, url: str, *, needs_key: bool, has_page: bool
) -> None:
    """Tell once that requests can be served, for people and, in JSON logs, for programs.

    Args:
        needs_key: whether a request must bring an API key.
        has_page: whether there is a page to open in a browser.
    """
    logger.info(
        "%s is ready on %s",
        summary.name,
        url,
        extra={
            "fields": startup_fields(summary, config, url),
            "details": "\n".join(
                [
                    startup_text(summary, config),
                    first_request(summary, url, needs_key),
                    *([f"  or open {url}/ in a browser"] if has_page else []),
                ]
            ),
        },
    )


def startup_fields(summary: EngineSummary, config: Config, url: str) -> dict[str, Any]:
    """The summary in JSON types."""
    return {
        "event": "ready",
        "url": url,
        "model": summary.name,
        "target": asdict(summary.target),
        "drafts": {name: asdict(draft) for name, draft in summary.drafts.items()},
        "drafters": list(summary.drafters),
        "policy": config.speculation.policy,
        "max_context": summary.max_context,
        "requests_that_fit": {str(length): n for length, n in _room(summary, config)},
        "limits": _limits(config),
        "sampling_defaults": _advised(summary),
    }


def startup_text(summary: EngineSummary, config: Config) -> str:
    """The summary as a small table."""
    target = summary.target
    room = ", ".join(f"{n} of {length}" for length, n in _room(summary, config))
    kv_cache = f"{target.kv_tokens} tokens in {_size(target.kv_bytes)}; requests that fit: {room}"
    drafters = f"{', '.join(summary.drafters) or 'none'}; policy {config.speculation.policy}"
    sampling = ", ".join(f"{name}={value:g}" for name, value in _advised(summary).items())
    rows = [
        ("model", _model(target)),
        *(
            (f"draft ({name})", f"{config.draft_model_of(name)}: {_model(draft)}")
            for name, draft in summary.drafts.items()
        ),
        ("device", _device(target)),
        ("context", f"{summary.max_context} tokens of prompt and output"),
        ("KV cache", kv_cache),
        ("drafters", drafters),
        ("limits", ", ".join(f"{name}={value}" for name, value in _limits(config).items())),
        ("sampling", f"{sampling} (the model's advice)" if sampling else "OpenAI's defaults"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def first_request(summary: EngineSummary, url: str, needs_key: bool) -> str:
    """A command that asks the server something, to paste into a terminal."""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    body: dict[str, Any] = {"model": summary.name, "max_tokens": 60}
    if summary.has_chat_template:
        route = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Name three rivers."}]
    else:
        route = "completions"
        body["prompt"] = "Once upon a time"
    command = f"curl {url}/v1/{route}{key} -H 'Content-Type: application/json'"
    return f"  try it:\n    {command} \\\n      -d {shlex.quote(json.dumps(body))}"


def _model(model: ModelSummary) -> str:
    return (
        f"{model.architecture}, {_count(model.num_parameters)} parameters, "
        f"{model.weight_format}, {_size(model.weight_bytes)}"
    )


def _device(model: ModelSummary) -> str:
    threads = "" if model.threads is None else f", {model.threads} threads"
    return f"{model.device}, {model.kernels} kernels{threads}"


def _room(summary: EngineSummary, config: Config) -> Iterator[tuple[int, int]]:
    """How many requests of what length can run at once."""
    for length in (summary.max_context, *_TYPICAL_TOKENS):
        if length <= summary.max_context:
            yield length, min(config.scheduler.max_running, summary.requests_that_fit(length))


def _limits(config: Config) -> dict[str, Any]:
    scheduler = config.scheduler
    queues = {"max_running": scheduler.max_running, "max_waiting": scheduler.max_waiting}
    admission = config.admission.model_dump(mode="json", exclude_none=True)
    return queues | admission | config.limits.model_dump(mode="json")


def _advised(summary: EngineSummary) -> dict[str, float]:
    return {k: v for k, v in asdict(summary.sampling_defaults).items() if v is not None}


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"


def _size(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{num_bytes / 2**20:.0f} MiB"
