"""TextTokenizer: text to token ids and back, byte-exact, with the model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine.request import ANSWER_NEXT, ChatOptions, RequestError
from engine.text.byte_tokens import ByteTokens
from engine.text.chat_template import ChatTemplate
from engine.text.generation_config import read_generation_config
from engine.text.infill import InfillTokens
from engine.text.vocabulary import UnsupportedTokenizerError, token_bytes_of

_MAX_REASON = 200
_PROBE = "Hello, world! 12 x\n"


class TextTokenizer(ByteTokens):
    """Safe to use from several threads.

    Attributes:
        chat_template: the model's.
        end_of_text_id: the tokenizer's own end token, if any.
        end_of_turn_id: what the chat template puts behind an answer, if anything.
        eos_ids: all tokens that end an output.
    """

    def __init__(self, tokenizer: Any, *, eos_ids: Iterable[int] = ()) -> None:
        """
        Args:
            tokenizer: a fast tokenizer of transformers.
            eos_ids: end tokens known from elsewhere, such as the generation config.

        Raises:
            UnsupportedTokenizerError: the tokens' bytes are not exact.
        """
        self._parsing: Tokenizer = tokenizer.backend_tokenizer
        serialised = self._parsing.to_str()
        self._plain = Tokenizer.from_str(serialised)
        self._plain.encode_special_tokens = True
        self.token_bytes = token_bytes_of(serialised)
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        special = {str(token.content): i for i, token in added.items() if token.special}
        self._infill = InfillTokens.find(special)
        self._adds_leading_space = self._detect_leading_space()
        self.chat_template = ChatTemplate(tokenizer, special)
        self.end_of_text_id: int | None = tokenizer.eos_token_id
        self.end_of_turn_id = self._find_end_of_turn()
        own = {i for i in (self.end_of_text_id, self.end_of_turn_id) if i is not None}
        self.eos_ids = frozenset(eos_ids) | own

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Load from a Hugging Face folder; end tokens also from its generation config.

        Raises:
            UnsupportedTokenizerError: it is damaged, missing or not a fast one.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # Damaged files make it raise whatever its parts do.
        except Exception as error:
            reason = " ".join(str(error).split())
            if "custom code" in reason:
                reason = "it needs code of its own, which is never run"
            raise UnsupportedTokenizerError(
                f"{folder}: its tokenizer can't be read: {reason[:_MAX_REASON]}"
            ) from error
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedTokenizerError(f"{folder.name}: has no fast tokenizer")
        return cls(tokenizer, eos_ids=read_generation_config(folder).eos_ids)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template.source)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; control tokens written in it are parsed as such."""
        return self._ids(self._parsing, text, add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text alone; what looks like a control token stays text."""
        return self._ids(self._plain, text, add_special_tokens=False)

    def encode_continuation(self, text: str) -> list[int] | None:
        """Token ids of text in the middle of a text, byte for byte.

        Unlike `encode_plain`, no space appears in front. None when no token boundary falls where
        the text begins, or the tokenizer normalises the text.
        """
        skip = 0
        if not self._adds_leading_space:
            ids = self.encode_plain(text)
        elif text.startswith(" "):
            ids = self.encode_plain(text[1:])
        else:
            ids = self.encode_plain("\n" + text)
            skip = self.index_at_byte(ids, len(" \n"))
            if skip < 0:
                return None
        ids = ids[skip:]
        return ids if self.bytes_of(ids) == text.encode() else None

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = ANSWER_NEXT
    ) -> list[int]:
        """Token ids of a conversation under the chat template, up to where the answer begins.

        Control tokens written inside a message or a tool stay text.

        Raises:
            RequestError: the template refuses the messages, or the model has none.
        """
        ids: list[int] = []
        for part in self.chat_template.parts(messages, options):
            if part.is_literal:
                ids += self.encode_plain(part.text)
            else:
                ids += self.encode(part.text, add_special_tokens=False)
        return ids

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Token ids of a prompt that asks for the text between two texts.

        Raises:
            RequestError: the model has no infill tokens.
        """
        if self._infill is None:
            raise RequestError(
                "The model has no infill tokens, so it can't serve 'suffix'.",
                param="suffix",
                code="unsupported_parameter",
            )
        start = self.encode("")
        return start + self._infill.prompt(self.encode_plain(prefix), self.encode_plain(suffix))

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        # Of a batch, even of one, because only that gives up the GIL: a text of a megabyte takes a
        # second, in which nothing else would run. It also leaves out offsets, which nobody asks.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _detect_leading_space(self) -> bool:
        encoded = self.bytes_of(self.encode_plain(_PROBE))
        if encoded == _PROBE.encode():
            return False
        if encoded == b" " + _PROBE.encode():
            return True
        raise UnsupportedTokenizerError("the tokenizer does not keep a text's bytes")

    def _find_end_of_turn(self) -> int | None:
        """The control token that the chat template puts behind an answer, if it does."""
        if not self.has_chat_template:
            return None
        turns = [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]
        try:
            parts = list(self.chat_template.parts(turns, ChatOptions(add_generation_prompt=False)))
        except RequestError:
            return None
        rendered = "".join(part.text for part in parts)
        behind = self.encode(rendered.rpartition("pong")[2], add_special_tokens=False)
        return behind[0] if behind and behind[0] in self.special_ids else None
