"""Tiny models made on the spot: a few seconds of training on a made-up language.

They are small enough for unit tests and know their language well enough that a draft is often
right and often wrong. A trained one is kept in build/ for as long as what makes it is the same.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TokenizerStyle = Literal["byte_level", "sentencepiece"]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
KEPT_IN = Path(__file__).parent.parent / "build" / "tiny-models"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_WHO = ["the cat", "a naïve robot", "my sister", "Zoë", "the 🦊", "nobody", "the old man"]
_DOES = ["eats", "likes", "paints", "counts", "can't find", "dreams of", "sells 12"]
_WHAT = ["green apples", "a 🚀🚀", "crème brûlée", "7 boxes", "the map", "def f(x): return x"]


def sentences(count: int, seed: int) -> str:
    """Mostly a fixed round of sentences, with surprises, so that two models often agree."""
    rng = random.Random(seed)
    turn = rng.randrange(len(_WHO))
    said = []
    for _ in range(count):
        turn = turn + 1 if rng.random() < 0.8 else rng.randrange(len(_WHO))
        who = _WHO[turn % len(_WHO)]
        does = _DOES[turn % len(_DOES)] if rng.random() < 0.9 else rng.choice(_DOES)
        what = _WHAT[2 * turn % len(_WHAT)] if rng.random() < 0.9 else rng.choice(_WHAT)
        said.append(f"{who} {does} {what}.")
    return " ".join(said)


def make_tokenizer(style: TokenizerStyle, vocab_size: int) -> PreTrainedTokenizerFast:
    corpus = [sentences(40, seed) for seed in range(50)]
    if style == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        extra: list[str] = []
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<|endoftext|>"))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet = []
        extra = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS + extra,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    pieces = corpus if style == "byte_level" else [word for text in corpus for word in text.split()]
    tokenizer.train_from_iterator(pieces, trainer)
    if style == "sentencepiece":
        tokenizer = _unmark_special(tokenizer, extra)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS[1:],
    )
    fast.chat_template = CHAT_TEMPLATE if style == "byte_level" else PLAIN_TEMPLATE
    return fast


def _unmark_special(tokenizer: Tokenizer, tokens: list[str]) -> Tokenizer:
    """Byte tokens belong to the vocabulary, not to the added tokens."""
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in set(tokens)]
    return Tokenizer.from_str(json.dumps(spec))


@dataclass(frozen=True, slots=True)
class Recipe:
    style: TokenizerStyle
    vocab_size: int
    hidden: int
    steps: int
    seed: int
    max_context: int

    def digest(self) -> str:
        """Of all that the trained weights depend on."""
        libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers")]
        made_of = [Path(__file__).read_text(encoding="utf-8"), repr(self), *libraries]
        return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:24]


def make_tiny_model(
    folder: Path,
    *,
    style: TokenizerStyle = "byte_level",
    vocab_size: int = 400,
    hidden: int = 64,
    steps: int = 120,
    seed: int = 0,
    max_context: int = 512,
    kept_in: Path = KEPT_IN,
) -> Path:
    """A two-layer Llama that knows the made-up language, as a Hugging Face folder.

    Trained where none is kept yet, by one process while others wait; `folder` is a copy to do as
    one likes with.
    """
    recipe = Recipe(style, vocab_size, hidden, steps, seed, max_context)
    kept = kept_in / recipe.digest()
    kept_in.mkdir(parents=True, exist_ok=True)
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=kept_in) as unfinished:
                train(recipe, Path(unfinished, "model")).rename(kept)
    return Path(shutil.copytree(kept, folder))


def train(recipe: Recipe, folder: Path) -> Path:
    tokenizer = make_tokenizer(recipe.style, recipe.vocab_size)
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden,
            intermediate_size=2 * recipe.hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=recipe.max_context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    ids = torch.tensor(tokenizer.encode(sentences(4000, seed=99), add_special_tokens=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.steps):
        starts = torch.randint(len(ids) - 65, (16,), generator=generator)
        batch = torch.stack([ids[start : start + 64] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
