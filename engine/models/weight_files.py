"""The weights of a model file under one set of names, as raw bytes: GGUF or safetensors."""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from engine.models.gguf_header import read_header
from engine.models.runner import UnsupportedModelError
from engine.models.source import ModelFiles, ModelSourceError

Bytes = npt.NDArray[np.uint8]


class FloatType(IntEnum):
    """Plain element types, numbered as the native extension does."""

    F32 = 0
    F16 = 1
    BF16 = 2

    @property
    def size(self) -> int:
        return 4 if self is FloatType.F32 else 2


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight as it lies in its file."""

    shape: tuple[int, ...]
    """Output features first."""
    data: Bytes
    float_type: FloatType | None
    """None: packed in blocks of `ggml_type`."""
    ggml_type: int | None = None
    """As numbered by ggml; None: not from a GGUF file."""

    def floats(self) -> npt.NDArray[np.float32]:
        """Its values.

        Raises:
            UnsupportedModelError: they are packed in a way that can't be unpacked; names it.
        """
        if self.float_type is FloatType.F32:
            values = self.data.view(np.float32)
        elif self.float_type is FloatType.F16:
            values = self.data.view(np.float16).astype(np.float32)
        elif self.float_type is FloatType.BF16:
            values = (self.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = self._dequantized()
        return values.reshape(self.shape)

    def rows(self, begin: int, end: int) -> Tensor:
        """Some of the outermost dimension."""
        row_bytes = self.data.size // self.shape[0]
        data = self.data[begin * row_bytes : end * row_bytes]
        return replace(self, shape=(end - begin, *self.shape[1:]), data=data)

    def _dequantized(self) -> npt.NDArray[np.float32]:
        type_ = GGMLQuantizationType(self.ggml_type)
        rows = self.data.reshape(-1, self.data.size * self.shape[-1] // math.prod(self.shape))
        try:
            values: npt.NDArray[np.float32] = gguf.dequantize(rows, type_)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"weights of the type {type_.name} can't be unpacked"
            ) from error
        return values


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """All weights of a model, by the names below, mapped from the disk.

    ``embedding``, ``head``, ``final_norm`` and, with the layer's number in front, ``3.q``, ``3.k``,
    ``3.v``, ``3.o``, ``3.gate``, ``3.up``, ``3.down``, ``3.attention_norm``, ``3.mlp_norm``,
    ``3.q_norm``, ``3.k_norm``, ``3.post_attention_norm``, ``3.post_mlp_norm``; ``3.q_bias`` and so
    on for biases.
    """

    tensors: Mapping[str, Tensor]
    interleaved_rope: bool
    """Rows of q and k stand in llama.cpp's order for Llama: RoPE pairs side by side."""
    norms_lack_one: bool
    """Norm weights are stored as w - 1."""


def open_weights(files: ModelFiles, *, is_gemma: bool) -> WeightFiles:
    """Map a model's weight files; nothing is read yet.

    Raises:
        ModelSourceError: a file is damaged.
        UnsupportedModelError: a tensor has an unknown name or type.
    """
    if files.is_gguf:
        return _open_gguf(files.weights)
    return _open_safetensors(files.weights, is_gemma)


_GGUF_GLOBAL = {"token_embd": "embedding", "output": "head", "output_norm": "final_norm"}
_GGUF_LAYER = {
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "post_attention_norm": "post_attention_norm",
    "post_ffw_norm": "post_mlp_norm",
}
_GGUF_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")

_HF_GLOBAL = {
    "model.embed_tokens": "embedding",
    "lm_head": "head",
    "model.norm": "final_norm",
}
_HF_LAYER = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}
_HF_GEMMA_LAYER = _HF_LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
_HF_NAME = re.compile(
    r"(?:model\.layers\.(?P<layer>\d+)\.)?(?P<part>[\w.]+)\.(?P<kind>weight|bias)"
)
_HF_DERIVED = ("rotary_emb.inv_freq",)
"""Tensors of old checkpoints that follow from the config."""
_SAFETENSORS_TYPES = {"F32": FloatType.F32, "F16": FloatType.F16, "BF16": FloatType.BF16}


def _canonical(
    name: str, pattern: re.Pattern[str], top: Mapping[str, str], layer: Mapping[str, str]
) -> str:
    match = pattern.fullmatch(name)
    part = None if match is None else (layer if match["layer"] else top).get(match["part"])
    if match is None or part is None:
        raise UnsupportedModelError(f"the native CPU decoder has no use for the tensor {name}")
    prefix = f"{int(match['layer'])}." if match["layer"] else ""
    return f"{prefix}{part}{'_bias' if match['kind'] == 'bias' else ''}"


def _map_file(path: Path) -> Bytes:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def _open_gguf(path: Path) -> WeightFiles:
    header = read_header(path)
    files = {part: _map_file(part) for part in {entry.path for entry in header.tensors}}
    tensors = {}
    for entry in header.tensors:
        data = files[entry.path]
        name = _canonical(entry.name, _GGUF_NAME, _GGUF_GLOBAL, _GGUF_LAYER)
        tensors[name] = Tensor(
            shape=entry.shape,
            data=data[entry.offset : entry.offset + entry.num_bytes],
            float_type=_SAFETENSORS_TYPES.get(entry.quantization),
            ggml_type=int(GGMLQuantizationType[entry.quantization]),
        )
    return WeightFiles(tensors, header.architecture == "llama", norms_lack_one=False)


def _open_safetensors(folder: Path, is_gemma: bool) -> WeightFiles:
    layer_names = _HF_GEMMA_LAYER if is_gemma else _HF_LAYER
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in _read_safetensors(path).items():
            if not name.endswith(_HF_DERIVED):
                tensors[_canonical(name, _HF_NAME, _HF_GLOBAL, layer_names)] = tensor
    return WeightFiles(tensors, interleaved_rope=False, norms_lack_one=is_gemma)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    data = _map_file(path)
    try:
        header_end = 8 + int(data[:8].view("<u8")[0])
        header = json.loads(data[8:header_end].tobytes())
    except (ValueError, IndexError) as error:
        raise ModelSourceError(f"{path}: damaged safetensors header ({error})") from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        float_type = _SAFETENSORS_TYPES.get(entry["dtype"])
        if float_type is None:
            raise UnsupportedModelError(
                f"the native CPU decoder does not read {entry['dtype']} weights ({name})"
            )
        begin, end = entry["data_offsets"]
        if header_end + end > len(data):
            raise ModelSourceError(f"{path}: cut short: {name} lies beyond its end")
        tensors[name] = Tensor(
            tuple(entry["shape"]), data[header_end + begin : header_end + end], float_type
        )
    return tensors
