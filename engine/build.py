"""Puts an engine together from the configuration."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.config import Config, ConfigError
from engine.core import EngineCore
from engine.draft.draft_model import DraftModel
from engine.draft.drafter import Drafter, DrafterResources, LoadedDraft
from engine.draft.policy import FixedPolicy, GoodputPolicy, Policy
from engine.draft.speculator import Speculator
from engine.draft.table import DRAFTERS, DrafterEntry, DraftModelKey
from engine.models.gguf import hf_folder
from engine.models.loader import Placement, load_runner
from engine.models.runner import ModelRunner
from engine.models.source import resolve
from engine.request import SamplingDefaults
from engine.sampling.grammar import Grammars
from engine.scheduling.blocks import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.serving.admission import ModelLimits
from engine.summary import EngineSummary, ModelSummary
from engine.text.generation_config import read_generation_config
from engine.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

_TARGET_GPU_SHARE = 0.8
"""Of the KV memory on a GPU, when a draft model takes the rest."""


def load_engine(config: Config) -> Callable[[], EngineCore]:
    """Load the models. The result makes a core of them, and another one when that has broken.

    Raises what `load_parts` raises.
    """
    return load_parts(config).start_core


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Loaded models, from which several cores can be assembled, one at a time."""

    config: Config
    model_name: str
    target: ModelRunner
    tokenizer: TextTokenizer
    make_drafters: Callable[[], tuple[Drafter, ...]]
    """Drafters without a past, over the loaded draft models."""
    drafters: tuple[Drafter, ...]
    limits: ModelLimits
    sampling_defaults: SamplingDefaults
    grammars: Grammars

    @property
    def draft_runners(self) -> dict[str, ModelRunner]:
        """The draft models' runners by the name of their drafter."""
        return {d.name: d.model.runner for d in self.drafters if d.model is not None}

    @property
    def runners(self) -> dict[str, ModelRunner]:
        """The target's by the model's name, then those of the draft models."""
        return {self.model_name: self.target, **self.draft_runners}

    def start_core(self) -> EngineCore:
        """A core without a past, drafters included, that has made its first passes."""
        core = self.assemble(self.make_drafters())
        core.warm_up()
        return core

    def assemble(
        self,
        drafters: Sequence[Drafter],
        *,
        prefix_cache: bool | None = None,
        policy: Policy | None = None,
    ) -> EngineCore:
        """A core with an empty queue and prefix cache that asks the given drafters.

        Args:
            prefix_cache: default: as configured.
            policy: default: as configured.
        """
        config, target = self.config, self.target
        return EngineCore(
            model_name=self.model_name,
            target=target,
            tokenizer=self.tokenizer,
            scheduler=Scheduler(
                BlockPool(
                    target.num_blocks,
                    target.block_size,
                    prefix_cache=config.kv.prefix_cache if prefix_cache is None else prefix_cache,
                ),
                max_running=config.scheduler.max_running,
                max_step_tokens=config.scheduler.max_step_tokens,
                prefill_chunk=config.scheduler.prefill_chunk,
                clock=time.monotonic,
            ),
            speculator=Speculator(
                drafters,
                policy or self._policy(drafters),
                max_length=config.speculation.max_draft_length,
            ),
            limits=self.limits,
            clock=time.monotonic,
            sampling_defaults=self.sampling_defaults,
            grammars=self.grammars,
        )

    def _policy(self, drafters: Sequence[Drafter]) -> Policy:
        speculation = self.config.speculation
        if speculation.policy == "fixed":
            return FixedPolicy(speculation.draft_length)
        costs = {drafter.name: drafter.cost for drafter in drafters}
        return GoodputPolicy(costs, first_length=speculation.draft_length)


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
    folder = hf_folder(files)
    tokenizer = TextTokenizer.load(folder)
    target = load_runner(
        files,
        config,
        placement,
        quantization=config.quantization,
        memory_key="kv.memory_mib",
        memory_mib=config.kv.memory_mib,
        gpu_share=config.kv.gpu_memory_fraction
        * (_TARGET_GPU_SHARE if config.draft_models else 1.0),
    )
    grammars = Grammars(tokenizer, target.info.vocab_size)
    make_drafters = load_drafters(config, placement, tokenizer, grammars)
    parts = EngineParts(
        config=config,
        model_name=config.served_names[0] if config.served_names else files.name,
        target=target,
        tokenizer=tokenizer,
        make_drafters=make_drafters,
        drafters=make_drafters(),
        limits=model_limits(config, target),
        sampling_defaults=read_generation_config(folder).sampling,
        grammars=grammars,
    )
    if all(r.info.kernels != "torch" for r in parts.runners.values()):
        # Torch only picks tokens then; its threads would spin on the cores of the native ones.
        torch.set_num_threads(1)
    return parts


def model_limits(config: Config, target: ModelRunner) -> ModelLimits:
    """What model, configuration and KV memory allow one request.

    Raises:
        ConfigError: `max_context` asks for more than there is.
    """
    of_model, of_memory = target.info.max_context, target.num_blocks * target.block_size
    memory_key = "kv.memory_mib" if target.info.device == "cpu" else "kv.gpu_memory_fraction"
    wanted = config.max_context
    if wanted is not None and wanted > of_model:
        raise ConfigError(f"max_context: {wanted} exceeds the model's {of_model}")
    if wanted is not None and wanted > of_memory:
        raise ConfigError(
            f"max_context: {wanted} tokens need more KV memory than {memory_key} gives, which is "
            f"enough for {of_memory}"
        )
    max_context = min(of_model, of_memory) if wanted is None else wanted
    cut_by = None
    if max_context < of_model:
        cut_by = memory_key if wanted is None else "max_context"
    return ModelLimits(max_context, target.info.vocab_size, cut_by)


def load_drafters(
    config: Config, placement: Placement, tokenizer: TextTokenizer, grammars: Grammars
) -> Callable[[], tuple[Drafter, ...]]:
    """Load the draft models; makes the configured drafters, less those that have no model.

    Args:
        tokenizer: the target's.
        grammars: the target's.
    """
    entries = [DRAFTERS[name] for name in dict.fromkeys(config.speculation.drafters)]
    needed = {entry.model_key for entry in entries}
    drafts: dict[DraftModelKey | None, Callable[[], LoadedDraft | None]] = {None: lambda: None}
    for key, reference in config.draft_models.items():
        if key in needed:
            drafts[key] = _load_draft(config, key, reference, placement)

    def make(entry: DrafterEntry) -> Drafter:
        draft = drafts[entry.model_key]()
        return entry.make(DrafterResources(config.speculation, tokenizer, grammars, draft))

    return lambda: tuple(make(entry) for entry in entries if entry.model_key in drafts)


def _load_draft(
    config: Config, key: DraftModelKey, reference: str, placement: Placement
) -> Callable[[], LoadedDraft]:
    files = resolve(reference)
    logger.info("loading %s %s", key, files.name)
    runner = load_runner(
        files,
        config,
        placement,
        quantization=config.draft_quantization,
        memory_key="kv.draft_memory_mib",
        memory_mib=config.kv.draft_memory_mib,
        gpu_share=config.kv.gpu_memory_fraction / 2,
    )
    tokenizer = TextTokenizer.load(hf_folder(files))

    def make() -> LoadedDraft:
        model = DraftModel(
            runner,
            max_context=runner.info.max_context,
            max_step_tokens=config.scheduler.prefill_chunk,
        )
        return LoadedDraft(model, tokenizer)

    return make


def summarize(core: EngineCore) -> EngineSummary:
    """What there is to tell about a loaded core."""
    drafters = core.speculator.drafters
    return EngineSummary(
        name=core.model_name,
        target=_model_summary(core.target),
        drafts={d.name: _model_summary(d.model.runner) for d in drafters if d.model is not None},
        drafters=tuple(drafter.name for drafter in drafters),
        max_context=core.limits.max_context,
        sampling_defaults=core.sampling_defaults,
        has_chat_template=core.tokenizer.has_chat_template,
    )


def _model_summary(runner: ModelRunner) -> ModelSummary:
    info = runner.info
    kv_tokens = runner.num_blocks * runner.block_size
    return ModelSummary(
        architecture=info.architecture,
        num_parameters=info.num_parameters,
        weight_bytes=info.weight_bytes,
        weight_format=info.dtype,
        device=info.device,
        kernels=info.kernels,
        threads=info.threads,
        kv_tokens=kv_tokens,
        kv_bytes=kv_tokens * info.kv_bytes_per_token,
    )
