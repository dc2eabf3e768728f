"""Grammars: compiles what requests ask of their output, and keeps each request's matcher."""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from typing import Any, assert_never

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from engine.request import GenerationRequest, GrammarSpec, Prelude, RequestError
from engine.sampling.grammar_matcher import GrammarMatcher, readable
from engine.sampling.grammar_tokens import GrammarTokenizer, GrammarVocabulary
from engine.sampling.schema_cost import embedded_schemas, why_too_costly

_MAX_CACHED = 64
_MAX_CACHED_BYTES = 512 << 10
"""Grammars are cached up to this much text; compiled ones are some hundred times larger."""

_NUM_TRIAL_TOKENS = 8
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""The library reads ahead while only one byte can follow: in ``/x+/ /x+/``, which never ends as the
first takes everything, for ever, in a thread that nothing can stop. Of statements the last counts.
"""
_ANSWER = "answer"
"""Name of the wanted grammar inside one that lets other text come first."""


def _limits() -> LLParserLimits:
    """What one grammar may cost: some 20 ms of lexer building at the start, 10 ms a mask."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=150_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Grammars:
    """The grammars of one target model.

    `compile` and `matcher` may be called from any thread, the others from the engine's alone.
    """

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        """
        Args:
            tokenizer: the target's.
            vocab_size: width of its logits.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._num_cached_bytes = 0
        self._lock = threading.Lock()
        self._matchers: dict[str, GrammarMatcher] = {}

    @property
    def num_compiled(self) -> int:
        """Grammars kept ready for use."""
        return len(self._compiled)

    def warm_up(self) -> None:
        """Index the vocabulary, which takes up to seconds, before the first request needs it."""
        if self._tokenizer.eos_ids:
            _ = self._vocabulary

    @property
    def vocab_size(self) -> int:
        """Tokens a mask has bits for; at least the logits' width."""
        return self._vocabulary.vocab_size

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        return GrammarVocabulary(self._tokenizer, self._vocab_size).index()

    def compile(self, spec: GrammarSpec) -> None:
        """Make sure that a grammar is valid, and ready for use.

        Raises:
            RequestError: it is malformed, unsatisfiable, too large, or of a kind of its language
                that can't be enforced.
        """
        self._start(spec)

    def matcher(self, spec: GrammarSpec) -> GrammarMatcher:
        """A matcher at the beginning of a grammar. Raises what `compile` raises."""
        return GrammarMatcher(self._start(spec), lambda: self._renew(spec))

    def add(self, request: GenerationRequest, matcher: GrammarMatcher | None = None) -> None:
        """Follow a request until `forget`; without a grammar there is nothing to follow."""
        if request.grammar is not None:
            self._matchers[request.request_id] = matcher or self.matcher(request.grammar)

    def of(self, request_id: str) -> GrammarMatcher | None:
        """The matcher of a request that has a grammar."""
        return self._matchers.get(request_id)

    def forget(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)

    def _start(self, spec: GrammarSpec) -> LLMatcher:
        with self._lock:
            known = self._compiled.get(spec)
            if known is not None:
                self._compiled.move_to_end(spec)
                return known
        if not self._tokenizer.eos_ids:
            raise _refusal("the model has no end token, without which no output can be complete")
        start = self._compile(spec)
        error = start.get_error() or self._error_ahead(start)
        if error:
            message = readable(error)
            raise _refusal("no output satisfies it" if "NoExtension" in message else message)
        self._keep(spec, start)
        return start

    def _renew(self, spec: GrammarSpec) -> LLMatcher:
        """A new compilation, for one request only; the one that was kept has broken."""
        with self._lock:
            if self._compiled.pop(spec, None) is not None:
                self._num_cached_bytes -= len(spec.text)
        return self._compile(spec)

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        grammar = _llguidance_grammar(spec)
        if (reason := _reason_to_refuse(spec)) is not None:
            raise _refusal(reason)
        start = LLMatcher(self._vocabulary, grammar, log_level=0, limits=_limits())
        if not start.is_error():
            # The first mask builds most of the lexer, which every copy then shares.
            start.compute_bitmask()
        return start

    def _error_ahead(self, start: LLMatcher) -> str:
        """Follow a few tokens: a grammar that is too complex mostly shows it at once."""
        matcher = start.deep_copy()
        ends = frozenset(self._tokenizer.eos_ids)
        for _ in range(_NUM_TRIAL_TOKENS):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            token_id = next((int(i) for i in allowed if i not in ends), None)
            if matcher.is_error() or token_id is None:
                break
            matcher.consume_token(token_id)
        return matcher.get_error()

    def _keep(self, spec: GrammarSpec, start: LLMatcher) -> None:
        with self._lock:
            if spec not in self._compiled:
                self._compiled[spec] = start
                self._num_cached_bytes += len(spec.text)
            while len(self._compiled) > 1 and (
                len(self._compiled) > _MAX_CACHED or self._num_cached_bytes > _MAX_CACHED_BYTES
            ):
                oldest, _ = self._compiled.popitem(last=False)
                self._num_cached_bytes -= len(oldest.text)


def _reason_to_refuse(spec: GrammarSpec) -> str | None:
    """What would take all memory, found before the library begins."""
    if spec.kind == "json_schema":
        return why_too_costly(json.loads(spec.text))
    if spec.kind in ("lark", "rules"):
        return why_too_costly(embedded_schemas(spec.text))
    return None


def _llguidance_grammar(spec: GrammarSpec) -> str:
    grammar = _to_llguidance(spec)
    if spec.prelude is None:
        return grammar
    if not grammar.startswith("{"):
        grammar = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    first, *others = json.loads(grammar)["grammars"]
    head = _behind(spec.prelude) + (_NO_FORCING if spec.kind == "lark" else "")
    parts = [{"lark_grammar": head}, {**first, "name": _ANSWER}, *others]
    return json.dumps({"grammars": parts})


def _behind(prelude: Prelude) -> str:
    """A grammar of free text up to its end tag, some white space, and the answer."""
    rest = f"free /[ \\n]{{0,4}}/ @{_ANSWER}"
    if prelude.start is not None:
        rest = f"@{_ANSWER} | {json.dumps(prelude.start)} {rest}"
    return f"start: {rest}\nfree[suffix={json.dumps(prelude.end)}]: /(?s:.*)/\n"


def _to_llguidance(spec: GrammarSpec) -> str:
    try:
        match spec.kind:
            case "json_object":
                return _from_json_schema({"type": "object"})
            case "json_schema":
                return _from_json_schema(json.loads(spec.text))
            case "regex":
                return LLMatcher.grammar_from_regex(spec.text)
            case "choice":
                return LLMatcher.grammar_from_lark(_one_of(json.loads(spec.text)))
            case "lark":
                lark = any_to_lark(spec.text) if "::=" in spec.text else spec.text
                return LLMatcher.grammar_from_lark(f"{lark}\n{_NO_FORCING}")
            case "rules":
                return LLMatcher.grammar_from_lark(spec.text)
    except (ValueError, RecursionError, GbnfToLarkError) as error:
        raise _refusal(readable(str(error))) from error
    assert_never(spec.kind)


def _from_json_schema(schema: Any) -> str:
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema must be an object")
    # One line, spaced as `json.dumps` does it: free white space lets a weak model fill its output
    # with blank lines, and leaves hardly a token forced.
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        defaults={
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        },
    )


def _one_of(choices: Any) -> str:
    is_list = isinstance(choices, list) and choices
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("the choices must be a list of at least one string")
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def _refusal(reason: str) -> RequestError:
    return RequestError(f"The output grammar can't be used: {reason}.", param="grammar")
