"""Chooses and loads the runner for a model."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import Config, ConfigError, Quantization
from engine.models.cpu_runner import CpuRunner
from engine.models.decoder_spec import decoder_spec
from engine.models.gguf import hf_folder, torch_folder
from engine.models.memory import InsufficientMemoryError
from engine.models.packing import packed_weights
from engine.models.runner import KvBudget, ModelRunner, UnsupportedModelError
from engine.models.source import ModelFiles, resolve
from engine.models.torch_runner import TorchRunner

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how precisely models run."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def resolve(cls, config: Config) -> Placement:
        """Settle `auto` and check that the device is there."""
        has_cuda = torch.cuda.is_available()
        if config.device == "cuda" and not has_cuda:
            raise ConfigError("device: cuda was asked for, but no CUDA device is available")
        on_cuda = has_cuda and config.device != "cpu"
        if config.dtype == "auto":
            dtype = torch.bfloat16 if on_cuda else torch.float32
        else:
            dtype = _DTYPES[config.dtype]
        return cls(torch.device("cuda" if on_cuda else "cpu"), dtype)


def load_runner(
    files: ModelFiles,
    config: Config,
    placement: Placement,
    *,
    quantization: Quantization,
    memory_key: str,
    memory_mib: int,
    gpu_share: float,
) -> ModelRunner:
    """Load a model with its KV cache.

    Args:
        quantization: of the weights, if the model runs natively.
        memory_key: the configuration key that `memory_mib` comes from, for messages.
        memory_mib: for KV blocks, on a CPU.
        gpu_share: of the free GPU memory for KV blocks, after the weights are loaded.

    Raises:
        ConfigError: the model or its KV blocks don't fit into memory; tells the sizes.
        UnsupportedModelError: no runner can serve the architecture; names it.
    """
    budget = KvBudget(
        block_size=config.kv.block_size,
        memory_bytes=memory_mib << 20,
        gpu_share=gpu_share,
        max_requests=config.scheduler.max_running,
        max_context=config.max_context,
        in_main_memory=placement.device.type == "cpu",
    )
    try:
        return _load(files, config, placement, quantization, budget)
    except InsufficientMemoryError as error:
        raise ConfigError(
            f"{memory_key}: the KV blocks of {files.name} take {error.needed >> 20} MiB of the "
            f"{memory_mib} MiB allowed, but only {error.free >> 20} MiB of memory are free"
        ) from error
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(placement.device)
        raise ConfigError(
            f"kv.gpu_memory_fraction: {files.name} with its KV blocks does not fit beside what "
            f"{config.kv.gpu_memory_fraction:g} has taken: {free >> 20} of {total >> 20} MiB of "
            "GPU memory are free"
        ) from error


def _load(
    files: ModelFiles,
    config: Config,
    placement: Placement,
    quantization: Quantization,
    budget: KvBudget,
) -> ModelRunner:
    if placement.device.type == "cpu" and config.runner != "torch":
        reason = CpuRunner.supports(_read_config(files))
        if reason is None:
            return CpuRunner.load(
                files,
                budget=budget,
                kv_dtype="float32" if config.kv.dtype == "auto" else config.kv.dtype,
                threads=config.threads,
                quantization=quantization,
            )
        if config.runner == "native":
            raise UnsupportedModelError(f"{files.name} can't run natively: {reason}")
        logger.warning("%s runs on torch, not on the native decoder: %s", files.name, reason)
    _refuse_other_kv(files, config, placement)
    return TorchRunner.load(
        torch_folder(files), device=placement.device, dtype=placement.dtype, budget=budget
    )


def _refuse_other_kv(files: ModelFiles, config: Config, placement: Placement) -> None:
    """Torch keeps K and V as it computes them."""
    if config.kv.dtype != "auto" and _DTYPES[config.kv.dtype] != placement.dtype:
        own = str(placement.dtype).removeprefix("torch.")
        raise ConfigError(
            f"kv.dtype: {files.name} runs on torch in {own} and keeps keys and values in it, "
            f"not in {config.kv.dtype}"
        )


def _read_config(files: ModelFiles) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((hf_folder(files) / "config.json").read_text("utf-8"))
    return values


def packed_matrices(config: Config) -> tuple[int, list[tuple[str, Any]]]:
    """Threads and packed weight matrices (format name, matrix) of the target, natively.

    Raises:
        UnsupportedModelError: the native decoder can't run the model here; says why.
    """
    files = resolve(config.model)
    model_config = _read_config(files)
    if (reason := CpuRunner.supports(model_config)) is not None:
        raise UnsupportedModelError(f"{files.name} can't run natively: {reason}")
    threads = config.threads or len(os.sched_getaffinity(0))
    spec = decoder_spec(model_config)
    weights = packed_weights(files, spec, config.quantization, threads)
    return threads, weights.native_matrices()
