"""Grammars: keeps compiled grammars ready for use, and each request's matcher."""

from __future__ import annotations

import functools
import threading

from cachetools import LRUCache
from llguidance import LLMatcher, LLTokenizer

from engine.request import GrammarSpec
from engine.sampling.grammar_compiler import CompiledGrammar, compile_grammar, start_of
from engine.sampling.grammar_matcher import GrammarMatcher
from engine.sampling.grammar_tokens import GrammarTokenizer, GrammarVocabulary, TokenTable
from engine.sampling.refusal import refusal

_MAX_CACHED = 64
_MAX_CACHED_BYTES = 512 << 10
"""Grammars are cached up to this much text; compiled ones are some hundred times larger."""


class Grammars:
    """The grammars of one target model.

    `known`, `compile`, `matcher` and `token_table` may be called from any thread, the others from
    the engine's alone.
    """

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        """
        Args:
            tokenizer: the target's.
            vocab_size: width of its logits.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = frozenset(tokenizer.eos_ids)
        self._compiled = LRUCache[GrammarSpec, CompiledGrammar](
            _MAX_CACHED_BYTES, lambda compiled: len(compiled.spec.text)
        )
        self._lock = threading.Lock()
        self._matchers: dict[str, GrammarMatcher] = {}

    @property
    def num_compiled(self) -> int:
        """Grammars kept ready for use."""
        return len(self._compiled)

    def warm_up(self) -> None:
        """Index the vocabulary, which takes up to seconds, before the first request needs it."""
        if self.are_possible:
            _ = self._vocabulary

    @property
    def vocab_size(self) -> int:
        """Tokens a mask has bits for; at least the logits' width."""
        return self._vocabulary.vocab_size

    @property
    def are_possible(self) -> bool:
        """Whether the model has an end token, without which no output can be complete."""
        return bool(self._end_ids)

    def token_table(self) -> TokenTable:
        """The vocabulary as plain data, for a compiler in another process.

        Raises:
            RequestError: the model has no end token.
        """
        self._require_end_token()
        tokens = self._tokenizer
        return TokenTable(
            tuple(tokens.token_bytes),
            frozenset(tokens.special_ids),
            self._end_ids,
            self._vocab_size,
        )

    def known(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """A grammar that is still kept ready."""
        with self._lock:
            return self._compiled.get(spec)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Make a grammar ready, however long that takes.

        Raises:
            RequestError: see `compile_grammar`; or the model has no end token.
        """
        known = self.known(spec)
        if known is not None:
            return known
        self._require_end_token()
        compiled = compile_grammar(spec, self._vocabulary, self._end_ids)
        self._keep(compiled)
        return compiled

    def matcher(self, grammar: CompiledGrammar) -> GrammarMatcher:
        """A matcher of its own for one request, at the beginning; takes microseconds."""
        return GrammarMatcher(grammar.start, lambda: self._renew(grammar.spec))

    def add(self, request_id: str, matcher: GrammarMatcher) -> None:
        """Follow a request until `forget`."""
        self._matchers[request_id] = matcher

    def of(self, request_id: str) -> GrammarMatcher | None:
        """The matcher of a request that has a grammar."""
        return self._matchers.get(request_id)

    def forget(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        return GrammarVocabulary(self._tokenizer, self._vocab_size).index()

    def _require_end_token(self) -> None:
        if not self.are_possible:
            raise refusal("the model has no end token, without which no output can be complete")

    def _renew(self, spec: GrammarSpec) -> LLMatcher:
        """A new compilation, for one request only; the one that was kept has broken."""
        with self._lock:
            self._compiled.pop(spec, None)
        return start_of(spec, self._vocabulary)

    def _keep(self, compiled: CompiledGrammar) -> None:
        """Keep it, in place of the least recently used; one of too much text is not kept."""
        spec = compiled.spec
        with self._lock:
            if spec in self._compiled or len(spec.text) > _MAX_CACHED_BYTES:
                return
            while len(self._compiled) >= _MAX_CACHED:
                self._compiled.popitem()
            self._compiled[spec] = compiled
