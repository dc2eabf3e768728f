"""TorchRunner: any transformers causal LM with pluggable attention, over a paged KV cache.

The reference for every test, the path for CUDA, and what serves architectures the native CPU
decoder does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.models.attention_shape import attention_shape
from engine.models.paged_attention import ATTENTION_NAME, AttentionStep, KvCache
from engine.models.runner import KvBudget, ModelInfo, UnsupportedModelError
from engine.plan import Chunk, StepPlan, pack

_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class TorchRunner:
    """Runs one model's forward passes with torch."""

    def __init__(self, model: PreTrainedModel, budget: KvBudget) -> None:
        """
        Args:
            model: loaded with `attn_implementation=ATTENTION_NAME`, on its device.

        Raises:
            UnsupportedModelError: the model does something this runner can't reproduce.
        """
        config = model.config.get_text_config()
        self._model = model.eval()
        self._device = model.device
        self._num_layers = int(config.num_hidden_layers)
        _, kv_heads, head_size = attention_shape(config)
        dtype = model.dtype
        bytes_per_token = 2 * self._num_layers * kv_heads * head_size * dtype.itemsize
        self.block_size = budget.block_size
        self.num_blocks = budget.num_blocks(
            bytes_per_token, int(config.max_position_embeddings), self._kv_memory(budget)
        )
        num_slots = self.num_blocks * self.block_size
        self._cache = KvCache.allocate(
            (self._num_layers, num_slots, kv_heads, head_size), dtype, self._device
        )
        self.info = ModelInfo(
            architecture=type(model).__name__,
            num_parameters=model.num_parameters(),
            vocab_size=int(config.vocab_size),
            max_context=int(config.max_position_embeddings),
            device=str(self._device),
            dtype=str(dtype).removeprefix("torch."),
            kv_bytes_per_token=bytes_per_token,
            weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
            kernels="torch",
            threads=torch.get_num_threads() if self._device.type == "cpu" else None,
        )
        self._try_out()

    @classmethod
    def load(
        cls, folder: Path, *, device: torch.device, dtype: torch.dtype, budget: KvBudget
    ) -> TorchRunner:
        """Load a Hugging Face folder with safetensors weights.

        Raises:
            UnsupportedModelError: the architecture can't be served; names it. Or the weights are
                not those of the configuration.
        """
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_unsupported(config)
        with _without_load_report():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # the report tells of them
                output_loading_info=True,
            )
        _refuse_incomplete(report)
        return cls(model.to(device), budget)

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """See `ModelRunner.execute`."""
        logits, _ = self._forward(plan)
        return logits

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> tuple[torch.Tensor, AttentionStep]:
        packed = pack(plan, self.block_size)
        step = AttentionStep(packed, self.block_size, self._cache)
        output = self._model(
            input_ids=self._tensor(packed.token_ids)[None],
            position_ids=self._tensor(packed.positions)[None],
            use_cache=False,
            logits_to_keep=self._tensor(packed.logit_rows),
            slipstream_step=step,
        )
        return output.logits[0].float(), step

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, torch.int64)

    def _kv_memory(self, budget: KvBudget) -> int:
        if self._device.type != "cuda":
            return budget.memory_bytes
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free * budget.gpu_share)

    def _try_out(self) -> None:
        """One forward pass at start: refuse a model whose layers bypass the paged attention."""
        name = self.info.architecture
        chunk = Chunk("try-out", 0, np.zeros(1, np.int32), block_ids=(0,))
        try:
            logits, step = self._forward(StepPlan((chunk,)))
        except (UnsupportedModelError, TypeError, KeyError, RuntimeError) as error:
            raise UnsupportedModelError(f"architecture {name} can't be served: {error}") from error
        if step.num_calls != self._num_layers or logits.shape != (1, self.info.vocab_size):
            raise UnsupportedModelError(
                f"architecture {name} can't be served: not every layer attends through the "
                "attention interface"
            )


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Transformers logs a table of what does not fit; the error says it in one line."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _refuse_incomplete(report: Mapping[str, Any]) -> None:
    """Transformers fills weights that it does not find with random numbers."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise UnsupportedModelError(f"the weights lack {missing[0]} ({len(missing)} in all)")
    mismatched = sorted(str(key[0]) for key in report["mismatched_keys"])
    if mismatched:
        raise UnsupportedModelError(f"{mismatched[0]} has another shape than config.json tells")


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModelError` for what is known, before loading weights, not to work."""
    name = (config.architectures or [config.model_type])[0]
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise UnsupportedModelError(f"architecture {name} is not a causal language model")
    model_class = mapping[type(config)]
    reasons = {
        "is an encoder-decoder": getattr(config, "is_encoder_decoder", False),
        "keeps a recurrent state": getattr(model_class, "_is_stateful", False),
        "has no pluggable attention": not model_class._supports_attention_backend,
        "has layers other than attention": not _KNOWN_LAYER_TYPES.issuperset(
            getattr(config.get_text_config(), "layer_types", None) or ()
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModelError(f"architecture {name} can't be served: it {reason}")
