"""Tiny models made on the spot: a few seconds of training on a made-up language.

They are small enough for unit tests and know their language well enough that a draft is often
right and often wrong.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Literal

import torch
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


def make_tiny_model(
    folder: Path,
    *,
    style: TokenizerStyle = "byte_level",
    vocab_size: int = 400,
    hidden: int = 64,
    steps: int = 120,
    seed: int = 0,
    max_context: int = 512,
) -> Path:
    """Train a two-layer Llama on the made-up language and save it as a Hugging Face folder."""
    tokenizer = make_tokenizer(style, vocab_size)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=max_context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    ids = torch.tensor(tokenizer.encode(sentences(4000, seed=99), add_special_tokens=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(ids) - 65, (16,), generator=generator)
        batch = torch.stack([ids[start : start + 64] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
