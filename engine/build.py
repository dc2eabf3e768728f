"""Puts an engine together from the configuration."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.admission import ModelLimits
from engine.async_engine import AsyncEngine
from engine.blocks import BlockPool
from engine.config import Config, ConfigError
from engine.core import EngineCore
from engine.draft.draft_model import DraftModel
from engine.draft.drafter import Drafter
from engine.draft.ngram import NgramDrafter
from engine.draft.universal import UniversalDrafter
from engine.models.gguf import hf_folder
from engine.models.loader import Placement, load_runner
from engine.models.runner import ModelRunner
from engine.models.source import resolve
from engine.scheduler import Scheduler
from engine.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

_TARGET_GPU_SHARE = 0.8
"""Of the KV memory on a GPU, when a draft model takes the rest."""


def build_async_engine(config: Config) -> AsyncEngine:
    """An engine that loads its models when started."""
    return AsyncEngine(
        lambda: build_core(config),
        max_requests=config.scheduler.max_running + config.scheduler.max_waiting,
    )


def build_core(config: Config) -> EngineCore:
    """Load the models and wire the core. Raises what `load_parts` raises."""
    parts = load_parts(config)
    _log_summary(parts)
    return parts.assemble(parts.drafters)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Loaded models, from which several cores can be assembled, one at a time."""

    config: Config
    model_name: str
    target: ModelRunner
    tokenizer: TextTokenizer
    drafters: tuple[Drafter, ...]
    limits: ModelLimits

    def assemble(self, drafters: Sequence[Drafter]) -> EngineCore:
        """A core with an empty queue and prefix cache that asks the given drafters."""
        config, target = self.config, self.target
        return EngineCore(
            model_name=self.model_name,
            target=target,
            tokenizer=self.tokenizer,
            scheduler=Scheduler(
                BlockPool(
                    target.num_blocks, target.block_size, prefix_cache=config.kv.prefix_cache
                ),
                max_running=config.scheduler.max_running,
                max_step_tokens=config.scheduler.max_step_tokens,
                prefill_chunk=config.scheduler.prefill_chunk,
                clock=time.monotonic,
            ),
            drafters=drafters,
            draft_length=config.speculation.draft_length,
            limits=self.limits,
            clock=time.monotonic,
        )


def load_parts(config: Config) -> EngineParts:
    """Load target and draft.

    Raises:
        ConfigError: keys that don't fit the models or the machine.
        ModelSourceError: a model reference leads nowhere.
        UnsupportedModelError: an architecture that can't be served; names it.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    placement = Placement.resolve(config)
    files = resolve(config.model)
    logger.info("loading %s", files.name)
    tokenizer = TextTokenizer.load(hf_folder(files))
    target = load_runner(
        files,
        config,
        placement,
        memory_mib=config.kv.memory_mib,
        gpu_share=config.kv.gpu_memory_fraction * (_TARGET_GPU_SHARE if config.draft else 1.0),
    )
    return EngineParts(
        config=config,
        model_name=config.served_name or files.name,
        target=target,
        tokenizer=tokenizer,
        drafters=tuple(_drafters(config, placement, tokenizer)),
        limits=ModelLimits(_max_context(config, target), target.info.vocab_size),
    )


def _max_context(config: Config, target: ModelRunner) -> int:
    """Tokens one request may have: what model, configuration and KV memory allow."""
    of_model, of_memory = target.info.max_context, target.num_blocks * target.block_size
    if config.max_context is None:
        return min(of_model, of_memory)
    if config.max_context > of_model:
        raise ConfigError(f"max_context: {config.max_context} exceeds the model's {of_model}")
    if config.max_context > of_memory:
        raise ConfigError(
            f"max_context: {config.max_context} tokens need more KV memory than kv.memory_mib "
            f"({config.kv.memory_mib}) gives, which is enough for {of_memory}"
        )
    return config.max_context


def _drafters(config: Config, placement: Placement, target: TextTokenizer) -> list[Drafter]:
    drafters: list[Drafter] = []
    for name in dict.fromkeys(config.speculation.drafters):
        if name == "ngram":
            speculation = config.speculation
            drafters.append(
                NgramDrafter(min_match=speculation.ngram_min, max_match=speculation.ngram_max)
            )
        elif config.draft is not None:
            drafters.append(_universal(config, config.draft, placement, target))
    return drafters


def _universal(
    config: Config, reference: str, placement: Placement, target: TextTokenizer
) -> UniversalDrafter:
    files = resolve(reference)
    logger.info("loading draft model %s", files.name)
    runner = load_runner(
        files,
        config,
        placement,
        memory_mib=config.kv.draft_memory_mib,
        gpu_share=config.kv.gpu_memory_fraction,
    )
    model = DraftModel(
        runner,
        max_context=runner.info.max_context,
        max_step_tokens=config.scheduler.prefill_chunk,
    )
    return UniversalDrafter(model, TextTokenizer.load(hf_folder(files)), target)


def _log_summary(parts: EngineParts) -> None:
    info, target = parts.target.info, parts.target
    kv_tokens = target.num_blocks * target.block_size
    logger.info(
        "%s: %s, %.0fM parameters, %s on %s",
        parts.model_name, info.architecture, info.num_parameters / 1e6, info.dtype, info.device,
    )  # fmt: skip
    logger.info(
        "context %d tokens; KV cache %d tokens (%d MiB), room for %d requests of full length",
        parts.limits.max_context, kv_tokens, kv_tokens * info.kv_bytes_per_token >> 20,
        kv_tokens // parts.limits.max_context,
    )  # fmt: skip
    logger.info("drafters: %s", ", ".join(d.name for d in parts.drafters) or "none")
