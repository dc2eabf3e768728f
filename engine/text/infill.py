"""Infill ("fill in the middle"): prompts that ask for what lies between two texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""Names that model families give the tokens before the prefix, before the suffix and before the
answer; all take them in this order (Bavarian et al., arXiv 2207.14255, call it PSM)."""


@dataclass(frozen=True, slots=True)
class InfillTokens:
    prefix: int
    suffix: int
    middle: int

    @classmethod
    def find(cls, special: Mapping[str, int]) -> InfillTokens | None:
        """
        Args:
            special: ids of the tokenizer's control tokens by content.
        """
        for form in _FORMS:
            if all(name in special for name in form):
                return cls(*(special[name] for name in form))
        return None

    def prompt(self, prefix: list[int], suffix: list[int]) -> list[int]:
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]
