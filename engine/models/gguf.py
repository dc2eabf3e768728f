"""Turns a GGUF file into the folder a Hugging Face model lies in, once, and keeps it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from engine.cache.location import model_cache
from engine.cache.model_cache import cache_key
from engine.models.folder_check import check_folder
from engine.models.gguf_header import GgufError, GgufHeader, gguf_parts, read_header
from engine.models.gguf_merge import merge
from engine.models.library_bars import BarReader
from engine.models.source import ModelFiles, ModelSourceError
from engine.progress import Reporter, reporting

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 2
"""Raised whenever what is written into the converted folders changes."""

_CONVERTING_LIBRARIES = ("gguf", "tokenizers", "transformers")
"""Another version may convert otherwise."""

_CONVERSION_ERRORS = (GgufError, NotImplementedError, ValueError, SafetensorError)
"""The last tells, among others, of a full disk."""
_METADATA_ERRORS = (
    LookupError, TypeError, AttributeError, ArithmeticError, StrictDataclassError
)  # fmt: skip
"""What the conversion meets in metadata of the wrong type or out of range."""
_END_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
)
"""Control tokens that end an answer; a GGUF file names only one, chat models have several."""

_TOKENS = "tokenizer.ggml.tokens"
_VOCABULARY = (
    _TOKENS,
    "tokenizer.ggml.merges",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type",
)

_UNSUPPORTED_ROPE_SCALING = ("linear", "yarn", "longrope")


def hf_folder(files: ModelFiles) -> Path:
    """The folder with the model's config.json, tokenizer.json, chat template and so on.

    That of a GGUF file is converted at the first call, which takes some seconds; afterwards it is
    there at once.

    Raises:
        ModelSourceError: the file can't be converted or the folder is damaged; says why.
        CacheError: the cache can't be written, or the file changes meanwhile.
    """
    if not files.is_gguf:
        check_folder(files.weights)
        return files.weights
    message = f"converting configuration and tokenizer of {files.name}, once"
    return _converted(files, "folder", message, _write_hf_files)


def torch_folder(files: ModelFiles) -> Path:
    """`hf_folder` with a model.safetensors beside it: every weight unpacked to float32.

    A converted model takes 4 bytes a parameter on disk, and three times that in memory while it is
    converted.

    Raises:
        ModelSourceError: transformers can't read the file; says why.
        CacheError: the cache can't be written, or the file changes meanwhile.
    """
    if not files.is_gguf:
        return files.weights
    template = hf_folder(files)
    message = f"unpacking the weights of {files.name} to float32, once"
    return _converted(
        files,
        "float32",
        message,
        lambda path, folder: _write_float32_weights(path, template, folder),
    )


def _converted(
    files: ModelFiles, form: str, message: str, write: Callable[[Path, Path], None]
) -> Path:
    """The cached folder for a GGUF file, made by `write(path, folder)` if it is missing."""
    path = files.weights
    cache = model_cache()
    contents = cache.contents(files.weight_files)
    libraries = (f"{name} {version(name)}" for name in _CONVERTING_LIBRARIES)
    key = cache_key("gguf", form, _FORMAT_VERSION, *libraries, contents.digest)

    def make(folder: Path) -> None:
        logger.info("%s ...", message)
        try:
            write(path, folder)
        except _CONVERSION_ERRORS as error:
            raise ModelSourceError(" ".join(str(error).split())) from error
        except _METADATA_ERRORS as error:
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            raise ModelSourceError(f"{path}: damaged GGUF metadata ({detail})") from error
        contents.require_unchanged()

    return cache.folder("converted", f"{path.stem}-{form}", key, make)


def _write_hf_files(path: Path, folder: Path) -> None:
    from engine.models.gguf_tokenizer import convert_tokenizer

    header = read_header(path)
    _refuse_lost_rope_scaling(path, header)
    with reporting("converting", path.stem, total=2) as progress:
        _write_json(folder / "config.json", _model_config(path, header, folder))
        progress.advance(1)
        _write_json(folder / "generation_config.json", _generation_config(header))
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(header))
        convert_tokenizer(path, header).save(str(folder / "tokenizer.json"))
    if template := header.metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _refuse_lost_rope_scaling(path: Path, header: GgufHeader) -> None:
    """transformers drops RoPE scaling when it reads a GGUF, and would answer wrongly in silence."""
    scaling = header.of_architecture("rope.scaling.type")
    if header.has_tensor("rope_freqs.weight"):
        scaling = "llama3"
    if scaling == "llama3" or scaling in _UNSUPPORTED_ROPE_SCALING:
        raise GgufError(
            f"{path}: RoPE scaling {scaling!r} can't be taken from a GGUF file; "
            "use the model's safetensors"
        )


@contextmanager
def _one_file(path: Path, folder: Path) -> Iterator[Path]:
    """The model in one file, which transformers needs; of parts one is made in `folder`."""
    if len(gguf_parts(path)) == 1:
        yield path
        return
    merged = folder / "merged.gguf"
    try:
        merge(path, merged, with_weights=True)
        yield merged
    finally:
        merged.unlink(missing_ok=True)


def _model_config(path: Path, header: GgufHeader, folder: Path) -> dict[str, Any]:
    """What transformers makes of a model's facts, read without its weights and vocabulary.

    It would take 3 to 20 s for the vocabulary, only to learn how large that is.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    told, tokens = header.of_architecture("vocab_size"), header.metadata.get(_TOKENS, ())
    adding = {f"{header.architecture}.vocab_size": len(tokens)} if tokens and told is None else {}
    facts = folder / "facts.gguf"
    try:
        merge(path, facts, with_weights=False, without=_VOCABULARY, adding=adding)
        config: dict[str, Any] = AutoConfig.from_pretrained(folder, gguf_file=facts.name).to_dict()
    finally:
        facts.unlink(missing_ok=True)
    if adding:  # not of every architecture does transformers read it
        config["vocab_size"] = len(tokens)
    config.pop("_name_or_path", None)
    config.pop("_model_name_or_path", None)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
    if architecture is None:
        raise GgufError(f"{path}: {config['model_type']!r} is no decoder-only language model")
    return {**config, "architectures": [architecture], "dtype": "float32"}


def _generation_config(header: GgufHeader) -> dict[str, Any]:
    from engine.models.gguf_tokenizer import control_tokens

    metadata = header.metadata
    controls = control_tokens(header)
    ends = [metadata.get("tokenizer.ggml.eos_token_id")]
    ends += [controls.get(text) for text in _END_OF_TEXT]
    values = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in values.items() if value is not None}


def _tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    from engine.models.gguf_tokenizer import token_text

    return {
        # A model's own tokenizer class would rebuild the splitting rules instead of reading them.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token_text(header, "bos"),
        "eos_token": token_text(header, "eos"),
        "unk_token": token_text(header, "unknown"),
        "pad_token": token_text(header, "padding"),
        "model_max_length": header.of_architecture("context_length"),
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_float32_weights(path: Path, template: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_model
    from transformers import AutoConfig, AutoModelForCausalLM

    # Given the configuration, transformers doesn't read the file a second time for it.
    config = AutoConfig.from_pretrained(template)
    with (
        reporting("unpacking", path.stem) as progress,
        _one_file(path, folder) as file,
        _bar_told_to(progress),
    ):
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, config=config, dtype=torch.float32
        )
    # Not save_pretrained: transformers counts a model that came from a GGUF as quantised.
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    for file in template.iterdir():
        shutil.copyfile(file, folder / file.name)


@contextmanager
def _bar_told_to(progress: Reporter) -> Iterator[None]:
    """Read the bar that counts unpacked tensors; drop transformers' other ones."""
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stderr(BarReader(progress)):
            yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()
