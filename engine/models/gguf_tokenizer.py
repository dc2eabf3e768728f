"""Makes a Hugging Face fast tokenizer of the vocabulary in a GGUF header.

transformers can do this too, but not faithfully: releases differ in what they make of SentencePiece
vocabularies (5.17: Unigram, 5.24: BPE), and all lose SmolLM's digit splitting and Qwen's NFC.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from engine.models.gguf_header import GgufError, GgufHeader

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _SplitRule:
    """How a family of byte-level tokenizers cuts text before merging."""

    pattern: str | None = None
    """None: GPT-2's pattern, which the ByteLevel pre-tokenizer has built in."""
    single_digits: bool = False
    nfc: bool = False
    whole_words_first: bool = False
    """A word that is in the vocabulary is taken whole, even if the merges would not make it."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[Any] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        )
        return pre_tokenizers.Sequence(steps)


_LLAMA3 = _SplitRule(
    f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}", whole_words_first=True
)
_QWEN2 = _SplitRule(f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_SYMBOLS_AND_SPACES}", nfc=True)
_SPLIT_RULES: Mapping[str, _SplitRule] = {
    "gpt-2": _SplitRule(),
    "smollm": _SplitRule(single_digits=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
}


def convert_tokenizer(path: Path, header: GgufHeader) -> Tokenizer:
    """The tokenizer a GGUF file describes, with its control tokens as special added tokens.

    Raises:
        GgufError: a kind of vocabulary that can't be converted.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(path, header)
    elif kind == "llama":
        tokenizer = _sentencepiece(header)
    else:
        raise GgufError(f"{path}: can't convert a tokenizer of kind {kind!r}")
    _mark_added_tokens(tokenizer, header)
    _add_bos_and_eos(tokenizer, header)
    if tokenizer.get_vocab_size() > len(header.metadata["tokenizer.ggml.tokens"]):
        raise GgufError(f"{path}: converting its tokenizer made up token ids")
    return tokenizer


def token_text(header: GgufHeader, role: str) -> str | None:
    """The token that has a role (``bos``, ``eos``, ``unknown``, ``padding``), or None."""
    token_id = header.metadata.get(f"tokenizer.ggml.{role}_token_id")
    return None if token_id is None else str(header.metadata["tokenizer.ggml.tokens"][token_id])


def control_tokens(header: GgufHeader) -> dict[str, int]:
    """Token ids of the control tokens, by text."""
    return _tokens_of_type(header, TokenType.CONTROL)


def _tokens_of_type(header: GgufHeader, wanted: TokenType) -> dict[str, int]:
    tokens = header.metadata["tokenizer.ggml.tokens"]
    types = header.metadata.get("tokenizer.ggml.token_type", [])
    return {
        token: index
        for index, (token, type_) in enumerate(zip(tokens, types, strict=False))
        if type_ == wanted
    }


def _byte_level(path: Path, header: GgufHeader) -> Tokenizer:
    rule_name = header.metadata.get("tokenizer.ggml.pre", "gpt-2")
    rule = _SPLIT_RULES.get(rule_name)
    if rule is None:
        raise GgufError(
            f"{path}: unknown pre-tokenizer {rule_name!r}; known are {', '.join(_SPLIT_RULES)}"
        )
    # Padding up to a round vocabulary size: no text has these tokens.
    unused = _tokens_of_type(header, TokenType.UNUSED)
    vocabulary = {
        token: index
        for index, token in enumerate(header.metadata["tokenizer.ggml.tokens"])
        if token not in unused
    }
    merges = [tuple(merge.split(" ")) for merge in header.metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.whole_words_first)
    )
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: GgufHeader) -> Tokenizer:
    """BPE over characters, with a visible space and bytes as the last resort (Gemma, Llama 2)."""
    # Runs of spaces may be spelled as they are; merging sees the visible ones.
    tokens = [
        _SPACE * len(token) if token and not token.strip(" ") else token
        for token in header.metadata["tokenizer.ggml.tokens"]
    ]
    never_merged = {
        *control_tokens(header),
        *_tokens_of_type(header, TokenType.UNKNOWN),
        *_tokens_of_type(header, TokenType.BYTE),
    }
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=list(_implied_merges(tokens, never_merged)),
            unk_token=token_text(header, "unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    decode = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    visible_spaces = normalizers.Replace(" ", _SPACE)
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), visible_spaces])
        decode.append(decoders.Strip(" ", left=1, right=0))
    else:
        tokenizer.normalizer = visible_spaces
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _implied_merges(tokens: list[str], never_merged: set[str]) -> Iterator[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, which lists tokens in the order they were learned.

    Any two tokens that make up a third merge into it, earlier tokens first.
    """
    known = set(tokens) - never_merged
    for token in tokens:
        if token not in known:
            continue
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                yield left, right


def _mark_added_tokens(tokenizer: Tokenizer, header: GgufHeader) -> None:
    """Make control and user-defined tokens match whole, the former as special tokens."""
    for type_ in (TokenType.CONTROL, TokenType.USER_DEFINED):
        # Runs of spaces are spelled otherwise in a SentencePiece vocabulary; merging finds them.
        known = [
            token
            for token, index in _tokens_of_type(header, type_).items()
            if tokenizer.token_to_id(token) == index
        ]
        special = type_ == TokenType.CONTROL
        tokenizer.add_tokens(
            [AddedToken(token, special=special, normalized=False) for token in known]
        )


def _add_bos_and_eos(tokenizer: Tokenizer, header: GgufHeader) -> None:
    """Wrap a text in the tokens the file asks for; SentencePiece files without a word get BOS."""
    is_sentencepiece = header.metadata["tokenizer.ggml.model"] == "llama"
    wanted = {
        "bos": header.metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece),
        "eos": header.metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    texts = {role: token_text(header, role) for role, add in wanted.items() if add}
    bos, eos = texts.get("bos"), texts.get("eos")
    ids = header.metadata
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*filter(None, [bos]), "$A", *filter(None, [eos])],
        pair=[*filter(None, [bos]), "$A", *filter(None, [eos]), "$B:1"],
        special_tokens=[
            (text, ids[f"tokenizer.ggml.{role}_token_id"])
            for role, text in texts.items()
            if text is not None
        ],
    )
