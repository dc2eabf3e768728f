"""CpuRunner: the native decoder over packed weights, one call a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.config import KvDtype, Quantization
from engine.kernels import load_native, native_available
from engine.models.architectures import LAYER_MATRICES
from engine.models.decoder_spec import DecoderSpec, decoder_spec
from engine.models.gguf import hf_folder
from engine.models.packing import Floats, PackedWeights, packed_weights
from engine.models.runner import KvBudget, ModelInfo, UnsupportedModelError
from engine.models.source import ModelFiles
from engine.plan import StepPlan, pack

if TYPE_CHECKING:
    from engine.kernels._native import PackedMatrix

_KV_TYPES: dict[KvDtype, str] = {"float32": "F32", "bfloat16": "BF16"}
"""Names in the extension's `KvType`."""
_MATRICES_OF = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""A layer's matrices by the part of a profile."""


class CpuRunner:
    """Runs one model's forward passes on the CPU. A row's logits have the same bits whatever
    stands beside it in the step, however its context was computed, on any number of threads."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: PackedWeights,
        budget: KvBudget,
        *,
        kv_dtype: KvDtype,
        threads: int,
        variant: str = "",
    ) -> None:
        """
        Args:
            variant: kernel variant by name ("" is the fastest this machine can run).

        Raises:
            UnsupportedModelError: weights and config do not belong together; names the tensor.
        """
        native = load_native()
        name = spec.architecture.class_name
        kv_type = native.KvType[_KV_TYPES[kv_dtype]]
        shape = spec.native_shape()
        with _refusal_of(name):
            block_bytes = native.kv_block_bytes(shape, len(spec.layers), budget.block_size, kv_type)
        bytes_per_token = -(-block_bytes // budget.block_size)
        self.block_size = budget.block_size
        self.num_blocks = budget.num_blocks(bytes_per_token, spec.max_context, budget.memory_bytes)
        self._pool = native.ThreadPool(threads)
        with _refusal_of(name):
            self._decoder = native.Decoder(
                self._pool,
                variant,
                shape,
                _top_weights(spec, weights),
                [_layer_weights(spec, weights, index) for index in range(len(spec.layers))],
                self.block_size,
                self.num_blocks,
                kv_type,
            )
        self._logits = np.empty((0, spec.vocab), np.float32)
        self._layers = len(spec.layers)
        self._weights = weights
        self.info = ModelInfo(
            architecture=name,
            num_parameters=_num_parameters(spec, weights),
            vocab_size=spec.vocab,
            max_context=spec.max_context,
            device="cpu",
            dtype=weights.main_format.name.lower(),
            kv_bytes_per_token=bytes_per_token,
            weight_bytes=weights.num_bytes,
            kernels=variant or native.variants()[0],
            threads=threads,
        )

    @staticmethod
    def supports(config: Mapping[str, Any]) -> str | None:
        """None when the native decoder can compute a model with this config.json, else why not."""
        if (reason := native_available()) is not None:
            return reason
        try:
            decoder_spec(config)
        except UnsupportedModelError as error:
            return str(error)
        return None

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        *,
        budget: KvBudget,
        kv_dtype: KvDtype = "float32",
        threads: int | None = None,
        quantization: Quantization = "auto",
        variant: str = "",
    ) -> CpuRunner:
        """Load a model, packing its weights if that was not done before.

        Args:
            threads: default: the cores this process may use.
            quantization: see `packing.packed_weights`.

        Raises:
            UnsupportedModelError: the native decoder can't compute this model; says why.
            ModelSourceError: a file is damaged.
        """
        config = json.loads((hf_folder(files) / "config.json").read_text(encoding="utf-8"))
        spec = decoder_spec(config)
        threads = threads or len(os.sched_getaffinity(0))
        weights = packed_weights(files, spec, quantization, threads)
        return cls(spec, weights, budget, kv_dtype=kv_dtype, threads=threads, variant=variant)

    def profile(self, plan: StepPlan, passes: int) -> dict[str, float]:
        """Seconds that each part of the decoder takes in a pass, the mean of some."""
        self._decoder.profile(True)
        for _ in range(passes):
            self.execute(plan)
        seconds = self._decoder.profile(False)
        return {part: total / passes for part, total in seconds.items()}

    def matrices_of(self, part: str) -> list[PackedMatrix]:
        """The matrices that a part of `profile` multiplies with."""
        held = self._weights.matrices
        if part == "head":
            return [_matrix(self._weights, "head" if "head" in held else "embedding")]
        return [
            _matrix(self._weights, f"{layer}.{name}")
            for layer in range(self._layers)
            for name in _MATRICES_OF.get(part, ())
        ]

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """See `ModelRunner.execute`."""
        step = pack(plan, self.block_size)
        wanted = len(step.logit_rows)
        if wanted > len(self._logits):
            self._logits = np.empty((wanted, self.info.vocab_size), np.float32)
        logits = self._logits[:wanted]
        self._decoder.forward(
            step.token_ids,
            step.positions,
            step.slots,
            step.query_starts,
            step.context_lens,
            step.block_tables,
            step.logit_rows,
            logits,
        )
        return torch.from_numpy(logits)


@contextmanager
def _refusal_of(architecture: str) -> Iterator[None]:
    """What the extension finds wrong with a model is told as any other reason not to serve it."""
    try:
        yield
    except ValueError as error:
        raise UnsupportedModelError(f"{architecture} can't be served: {error}") from error


def _num_parameters(spec: DecoderSpec, weights: PackedWeights) -> int:
    head_is_a_copy = spec.tied and {"embedding", "head"} <= weights.matrices.keys()
    return weights.num_parameters - (spec.vocab * spec.hidden if head_is_a_copy else 0)


def _matrix(weights: PackedWeights, name: str) -> PackedMatrix:
    packed = weights.matrices.get(name)
    if packed is None:
        raise UnsupportedModelError(f"the weights lack {name}")
    return packed.native()


def _vector(weights: PackedWeights, name: str) -> Floats:
    vector = weights.vectors.get(name)
    if vector is None:
        raise UnsupportedModelError(f"the weights lack {name}")
    return vector


def _top_weights(spec: DecoderSpec, weights: PackedWeights) -> dict[str, Any]:
    final_norm = _vector(weights, "final_norm")
    top = {
        name: _matrix(weights, name) for name in ("embedding", "head") if name in weights.matrices
    }
    if spec.tied and top:
        only = next(iter(top.values()))
        top = {"embedding": only, "head": only} | top
    for name in ("embedding", "head"):
        if name not in top:
            raise UnsupportedModelError(f"the weights lack {name}")
    return top | {"final_norm": final_norm}


def _layer_weights(spec: DecoderSpec, weights: PackedWeights, index: int) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "window": spec.layers[index].window,
        "rope_table": spec.layers[index].rope_table,
    }
    for part in spec.architecture.layout.norms:
        parts[part] = _vector(weights, f"{index}.{part}")
    for part in LAYER_MATRICES:
        parts[part] = _matrix(weights, f"{index}.{part}")
        bias = weights.vectors.get(f"{index}.{part}_bias")
        if bias is not None:
            parts[f"{part}_bias"] = bias
    return parts
