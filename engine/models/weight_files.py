"""The weights of a model file under one set of names, as raw bytes: GGUF or safetensors."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from engine.models.architectures import TOP_TENSORS, Architecture
from engine.models.gguf_header import TensorEntry, read_header
from engine.models.runner import UnsupportedModelError
from engine.models.safetensors_header import read_safetensors_header
from engine.models.source import ModelFiles

Bytes = npt.NDArray[np.uint8]

_FLOAT_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight as it lies in its file."""

    shape: tuple[int, ...]
    """Output features first."""
    data: Bytes
    element_type: str
    """A float type, or ggml's name of the blocks that elements are packed in."""

    @property
    def is_float(self) -> bool:
        return self.element_type in _FLOAT_TYPES

    def floats(self) -> npt.NDArray[np.float32]:
        """Its values.

        Raises:
            UnsupportedModelError: they are packed in a way that can't be unpacked; names it.
        """
        match self.element_type:
            case "F32":
                values = self.data.view(np.float32)
            case "F16":
                values = self.data.view(np.float16).astype(np.float32)
            case "BF16":
                values = (self.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            case _:
                values = self._dequantized()
        return values.reshape(self.shape)

    def rows(self, begin: int, end: int) -> Tensor:
        """Some of the outermost dimension."""
        row_bytes = self.data.size // self.shape[0]
        data = self.data[begin * row_bytes : end * row_bytes]
        return replace(self, shape=(end - begin, *self.shape[1:]), data=data)

    def _dequantized(self) -> npt.NDArray[np.float32]:
        rows = self.data.reshape(-1, self.data.size * self.shape[-1] // math.prod(self.shape))
        try:
            values: npt.NDArray[np.float32] = gguf.dequantize(
                rows, GGMLQuantizationType[self.element_type]
            )
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"weights of the type {self.element_type} can't be unpacked"
            ) from error
        return values


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """All weights of a model, mapped from the disk."""

    tensors: Mapping[str, Tensor]
    """By the names in `architectures`, those of a layer with its number in front (``3.q``), biases
    with ``_bias`` behind (``3.q_bias``)."""
    interleaved_rope: bool
    """Rows of q and k stand in llama.cpp's order for Llama: RoPE pairs side by side."""
    norm_offset: float
    """What the norm weights lack."""


def open_weights(files: ModelFiles, architecture: Architecture) -> WeightFiles:
    """Map a model's weight files; nothing is read yet.

    Raises:
        ModelSourceError: a file is damaged.
        UnsupportedModelError: a tensor has an unknown name or type.
    """
    if files.is_gguf:
        return _open_gguf(files.weights, architecture)
    return _open_safetensors(files.weights, architecture)


_GGUF_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)")
_SAFETENSORS_NAME = re.compile(
    r"(?:model\.layers\.(?P<layer>\d+)\.)?(?P<stem>[\w.]+)\.(?P<kind>weight|bias)"
)
_DERIVED = ("rotary_emb.inv_freq",)
"""Tensors of old checkpoints that follow from the config."""


def _open_gguf(path: Path, architecture: Architecture) -> WeightFiles:
    header = read_header(path)
    if header.architecture != architecture.gguf_name:
        raise UnsupportedModelError(
            f"the native CPU decoder does not know {header.architecture} as "
            f"{architecture.class_name}"
        )
    names = _Names(
        _GGUF_NAME,
        {name.gguf: part for part, name in TOP_TENSORS.items()},
        {name.gguf: part for part, name in architecture.layout.layer_tensors.items()},
    )
    tensors = dict(_mapped(header.tensors, names))
    return WeightFiles(tensors, architecture.layout.interleaved_gguf_rope, norm_offset=0.0)


def _open_safetensors(folder: Path, architecture: Architecture) -> WeightFiles:
    names = _Names(
        _SAFETENSORS_NAME,
        {name.safetensors: part for part, name in TOP_TENSORS.items()},
        {name.safetensors: part for part, name in architecture.layout.layer_tensors.items()},
    )
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        entries = [e for e in read_safetensors_header(path) if not e.name.endswith(_DERIVED)]
        for entry in entries:
            if entry.element_type not in _FLOAT_TYPES:
                raise UnsupportedModelError(
                    "the native CPU decoder does not read "
                    f"{entry.element_type} weights ({entry.name})"
                )
        tensors |= _mapped(entries, names)
    return WeightFiles(tensors, interleaved_rope=False, norm_offset=architecture.layout.norm_offset)


@dataclass(frozen=True, slots=True)
class _Names:
    """Turns a file's names into the decoder's."""

    pattern: re.Pattern[str]
    top: Mapping[str, str]
    layer: Mapping[str, str]

    def canonical(self, name: str) -> str:
        match = self.pattern.fullmatch(name)
        parts = self.layer if match and match["layer"] else self.top
        part = match and parts.get(match["stem"])
        if not match or not part:
            raise UnsupportedModelError(f"the native CPU decoder has no use for the tensor {name}")
        prefix = f"{int(match['layer'])}." if match["layer"] else ""
        return f"{prefix}{part}{'_bias' if match['kind'] == 'bias' else ''}"


def _mapped(entries: Iterable[TensorEntry], names: _Names) -> Iterator[tuple[str, Tensor]]:
    files: dict[Path, Bytes] = {}
    for entry in entries:
        if entry.path not in files:
            files[entry.path] = _map_file(entry.path)
        content = files[entry.path][entry.offset : entry.offset + entry.num_bytes]
        yield names.canonical(entry.name), Tensor(entry.shape, content, entry.element_type)


def _map_file(path: Path) -> Bytes:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
