"""Models and tokenizers small enough that every probability is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from engine.models.runner import ModelInfo
from engine.plan import StepPlan
from engine.request import ANSWER_NEXT, ChatOptions, RequestError
from engine.text.byte_tokens import ByteTokens
from tests.engine.mock_model import MockRunner

END = b"<end>"


class FakeTokenizer(ByteTokens):
    """Longest match first over given pieces; a byte-exact `TextTokenizer` without files."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        *,
        special_ids: Iterable[int] = (),
        end_id: int | None = None,
        end_of_turn_id: int | None = None,
        template: str | None = None,
    ) -> None:
        """
        Args:
            template: formatted with role and content for each message; None: no chat template;
                an empty string: a template that refuses all messages.
        """
        self.token_bytes = list(token_bytes)
        self.end_of_text_id = end_id
        self.end_of_turn_id = end_of_turn_id
        self.eos_ids = frozenset(i for i in (end_id, end_of_turn_id) if i is not None)
        self.special_ids = frozenset(special_ids) | self.eos_ids
        self._template = template
        self._ids = {
            piece: token_id
            for token_id, piece in reversed(list(enumerate(token_bytes)))
            if piece and token_id not in self.special_ids
        }
        self._longest = max(map(len, self._ids))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode_plain(text)

    def encode_plain(self, text: str) -> list[int]:
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            for length in range(self._longest, 0, -1):
                token_id = self._ids.get(data[at : at + length])
                if token_id is not None:
                    break
            else:
                raise AssertionError(f"no piece for {data[at:]!r}")
            ids.append(token_id)
            at += len(self.token_bytes[token_id])
        return ids

    def encode_continuation(self, text: str) -> list[int] | None:
        return self.encode_plain(text)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], options: ChatOptions = ANSWER_NEXT
    ) -> list[int]:
        if not self._template:
            raise RequestError("this template refuses the messages", param="messages")
        return self.encode("".join(self._template.format(**message) for message in messages))


class TableRunner:
    """A Markov chain: the logits depend on the last token alone, so joint probabilities are known.

    It needs no KV cache and answers a step of hundreds of requests at once.
    """

    def __init__(self, table: np.ndarray, *, num_blocks: int = 4096, block_size: int = 16) -> None:
        """
        Args:
            table: float32[V, V], logits of the next token by last token.
        """
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._table = torch.tensor(table, dtype=torch.float32)
        self.info = ModelInfo("Table", 0, len(table), 4096, "cpu", "float32", 8, 0, "mock", 1)

    def execute(self, plan: StepPlan) -> torch.Tensor:
        rows = np.concatenate([s.token_ids[s.first_logit :] for s in plan.chunks])
        return self._table[torch.from_numpy(rows).long()]


class TextRunner(MockRunner):
    """The mock model, with a will of its own about the text whatever its pieces are.

    The next character is usually a function of the last two, so that models with different
    tokenizers often agree; the rest is noise that depends on the whole context read back through
    the paged cache, so that any stale or misplaced K and V shows in the output.
    """

    def __init__(
        self,
        tokenizer: Any,
        alphabet: str,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        salt: int = 0,
        will: float = 6.0,
        vocab_size: int | None = None,
    ) -> None:
        """
        Args:
            will: what the expected tokens' logits have over the others', whose deviation is 1.
            vocab_size: more than the tokenizer has tokens: padding.
        """
        super().__init__(num_blocks, block_size, salt=salt)
        self._tokenizer = tokenizer
        self._alphabet = alphabet.encode()
        self._will = will
        self._wishes: dict[bytes, np.ndarray] = {}
        size = vocab_size or len(tokenizer.token_bytes)
        self.info = ModelInfo("Text", 0, size, 4096, "cpu", "float32", 8, 0, "mock", 1)

    def _logits(self, context: np.ndarray) -> np.ndarray:
        weights = np.arange(1, len(context) + 1) * 2654435761 + self._salt
        digest = int((context * weights).sum()) & 0xFFFFFFFF
        logits = np.random.default_rng(digest).normal(size=self.info.vocab_size)
        pieces = self._tokenizer.token_bytes
        recent = b"".join(pieces[i] for i in context[-4:] if i < len(pieces))[-2:].rjust(2)
        if recent not in self._wishes:
            self._wishes[recent] = self._wish(self._continuation(recent, 4))
        return logits + self._wishes[recent]

    def _wish(self, wanted: bytes) -> np.ndarray:
        wish = np.zeros(self.info.vocab_size)
        for token_id, piece in enumerate(self._tokenizer.token_bytes):
            if token_id in self._tokenizer.eos_ids:
                wish[token_id] = self._will if wanted.startswith(b"!") else -self._will
            elif piece and wanted.startswith(piece):
                wish[token_id] = self._will + len(piece)
        return wish

    def _continuation(self, recent: bytes, count: int) -> bytes:
        """The text that ought to come; "!" stands for its end."""
        text = recent
        for _ in range(count):
            number = text[-2] * 7 + text[-1] * 3
            text += self._alphabet[number % len(self._alphabet)].to_bytes()
        return text[len(recent) :]
