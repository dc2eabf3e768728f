"""What is made of a request, and in which thread: never the event loop's or the engine's."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from engine.core import EngineCore
from engine.draft.suffix_index import SuffixIndex
from engine.draft.token_index import ContinuationIndex, TokenIndex, suffixes
from engine.preparation import Preparation
from engine.request import ChatPrompt, GenerationRequest, GrammarSpec, RequestError
from engine.sampling import grammar as grammar_module
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_trials import GrammarTrials
from engine.serving.async_engine import AsyncEngine
from engine.serving.request_workers import NUM_COMPILERS, NUM_TEXT_THREADS
from engine.text.tokenizer import TextTokenizer
from tests.engine.helpers import text_of, tokens_of
from tests.engine.test_recovery import read
from tests.structured.engines import NUM_PADDING, alone, make_engine, structured, tokenizer

LONG = "the old man sells 12 boxes. the cat eats "
CHOICE = GrammarSpec("choice", json.dumps(["the cat eats", "a map of the town"]))
LARGE = 300
"""Characters or tokens that a step of the engine never touches at once."""


@asynccontextmanager
async def started(core: EngineCore, max_requests: int = 100) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(lambda: lambda: core, max_requests=max_requests)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


class Places:
    """In which threads something large was done."""

    def __init__(self) -> None:
        self.of: dict[str, set[str]] = {}

    def note(self, what: str, size: int = LARGE) -> None:
        if size >= LARGE:
            thread = threading.current_thread().name.rpartition("_")
            self.of.setdefault(what, set()).add(thread[0] or thread[2])

    def watch(
        self, patch: pytest.MonkeyPatch, owner: Any, name: str, size: Callable[..., int]
    ) -> None:
        inner = getattr(owner, name)

        def noting(*arguments: Any, **options: Any) -> Any:
            self.note(f"{owner.__name__}.{name}", size(*arguments, **options))
            return inner(*arguments, **options)

        is_static = isinstance(owner.__dict__.get(name), staticmethod)
        patch.setattr(owner, name, staticmethod(noting) if is_static else noting)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    places = Places()
    places.watch(monkeypatch, TextTokenizer, "_ids", lambda _, text, *__, **___: len(text))
    for index in (TokenIndex, ContinuationIndex):
        places.watch(monkeypatch, index, "__init__", lambda _, ids, __: len(ids))
    for name in ("compile_grammar", "start_of"):
        places.watch(monkeypatch, grammar_module, name, lambda *_: LARGE)
    for module in (
        "engine.serving.preparer",
        "engine.scheduling.scheduler",
        "engine.draft.draft_model",
    ):
        owner = __import__(module, fromlist=["x"])
        places.watch(
            monkeypatch,
            owner,
            "extend_block_hashes",
            lambda hashes, ids, size, count, *_: count - size * len(hashes),
        )
    extend = SuffixIndex.extend

    def noting(self: SuffixIndex, token_ids: Sequence[int]) -> None:
        places.note("SuffixIndex.extend", len(token_ids) - self.num_indexed)
        extend(self, token_ids)

    monkeypatch.setattr(SuffixIndex, "extend", noting)
    return places


async def test_all_that_grows_with_a_request_is_done_in_threads_for_it(places: Places) -> None:
    """Its prediction, its prompt for every drafter, the indexes and hashes, its grammar."""
    core = make_engine("auto", num_blocks=2048)
    core.grammars = Grammars(tokenizer(), len(tokenizer().token_bytes) + NUM_PADDING)
    core.preparer._grammars = core._verifier._grammars = core.grammars
    core.requests._grammars = core.grammars
    async with started(core) as engine:
        chat = ChatPrompt(({"role": "user", "content": 40 * LONG},))
        request = replace(
            structured(CHOICE, "r", prompt=40 * LONG, prediction=40 * LONG), source=chat
        )
        places.of.clear()
        grammar = await engine.compile_grammar(CHOICE, time_limit=20)
        preparation = await engine.prepare(request, grammar)
        outputs = await read(engine.submit(request, preparation))
    assert text_of(outputs) in ("the cat eats", "a map of the town")
    assert outputs[-1].usage.prediction_tokens == preparation.num_prediction_tokens > LARGE
    text, grammar_threads = {"slipstream-text"}, {"slipstream-grammar"}
    assert places.of == {
        "TextTokenizer._ids": text,
        "TokenIndex.__init__": text,
        "ContinuationIndex.__init__": text,
        "engine.serving.preparer.extend_block_hashes": text,
        "engine.draft.draft_model.extend_block_hashes": text,
        "engine.sampling.grammar.compile_grammar": grammar_threads,
    }


async def test_a_prediction_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_engine("predicted")
    request = structured(None, "r", prediction=LONG)
    seen: list[str] = []
    plain = core.tokenizer.encode_plain

    def noting(text: str) -> list[int]:
        seen.append(text)
        return plain(text)

    monkeypatch.setattr(core.tokenizer, "encode_plain", noting)
    async with started(core) as engine:
        await read(engine.submit(request, await engine.prepare(request)))
    assert seen == [LONG]


async def test_a_grammar_that_was_evicted_is_not_compiled_again(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_CACHED", 1)
    core = make_engine()
    core.grammars = Grammars(tokenizer(), len(tokenizer().token_bytes) + NUM_PADDING)
    core._verifier._grammars = core.requests._grammars = core.grammars
    request = structured(CHOICE, "r")
    async with started(core) as engine:
        grammar = await engine.compile_grammar(CHOICE, time_limit=20)
        await engine.compile_grammar(GrammarSpec("regex", "x+"), time_limit=20)
        assert core.grammars.known(CHOICE) is None
        places.of.clear()
        preparation = await engine.prepare(request, grammar)
        outputs = await read(engine.submit(request, preparation))
    assert not any("grammar" in what for what in places.of)
    assert tokens_of(outputs) == tokens_of(alone(request))


async def test_choices_share_a_preparation_and_nothing_else() -> None:
    """Each has its own place in the grammar, the prediction and the index."""
    letters = GrammarSpec("regex", "[abc]{4,6}")
    first = structured(letters, "r0", temperature=1.0, prediction="abcabc")
    choices = [
        replace(first, request_id=f"r{n}", params=first.params.for_choice(n)) for n in range(4)
    ]
    async with started(make_engine("auto")) as engine:
        grammar = await engine.compile_grammar(letters, time_limit=20)
        preparation = await engine.prepare(first, grammar)
        streams = [engine.submit(choice, preparation) for choice in choices]
        texts = [text_of(await read(stream)) for stream in streams]
    assert texts == [text_of(alone(choice)) for choice in choices]
    assert len(set(texts)) > 1


async def test_slow_grammars_hold_up_neither_texts_nor_known_grammars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    checking: list[str] = []

    def slow(self: GrammarTrials, spec: GrammarSpec, *_: object) -> None:
        checking.append(spec.text)
        release.wait(20)

    async with started(make_engine()) as engine:
        known = await engine.compile_grammar(CHOICE, time_limit=20)
        monkeypatch.setattr(GrammarTrials, "check", slow)
        specs = [GrammarSpec("regex", f"slow{i}") for i in range(40)]
        waiting = [asyncio.create_task(engine.compile_grammar(s, time_limit=20)) for s in specs]
        async with asyncio.timeout(5):
            while len(checking) < NUM_COMPILERS:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            assert await engine.encode(LONG)
            assert await engine.compile_grammar(CHOICE, time_limit=20) is known
            request = structured(CHOICE, "r")
            assert await read(engine.submit(request, await engine.prepare(request, known)))
        assert len(checking) == NUM_COMPILERS
        release.set()
        assert [grammar.spec for grammar in await asyncio.gather(*waiting)] == specs


async def test_slow_texts_hold_up_no_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    async with started(make_engine()) as engine:
        monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: release.wait(20))
        texts = [asyncio.create_task(engine.encode("a")) for _ in range(2 * NUM_TEXT_THREADS)]
        async with asyncio.timeout(10):
            await engine.compile_grammar(GrammarSpec("regex", "quick"), time_limit=20)
        release.set()
        assert all(await asyncio.gather(*texts))


async def test_a_grammar_over_its_time_is_refused_and_its_process_replaced() -> None:
    words = json.dumps([f"choice number {i} of all these" for i in range(1800)])
    slow = GrammarSpec("choice", words)
    async with started(make_engine()) as engine:
        trials = engine._workers._trials
        async with asyncio.timeout(20):
            while not trials._idle:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (first,) = trials.process_ids
        with pytest.raises(RequestError, match=r"takes longer than 0\.002 s"):
            await engine.compile_grammar(slow, time_limit=0.002)
        async with asyncio.timeout(20):
            while not trials._idle:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (second,) = trials.process_ids
        assert first != second
        await engine.compile_grammar(slow, time_limit=20)
        assert trials.process_ids == [second]
    assert trials.process_ids == []


async def test_a_request_the_model_can_not_serve_is_refused_before_it_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_engine()
    prepared: list[GenerationRequest] = []
    monkeypatch.setattr(core.preparer, "prepare", lambda request, _: prepared.append(request))
    async with started(core) as engine:
        with pytest.raises(RequestError, match="maximum context length"):
            await engine.prepare(structured(None, max_tokens=10**6))
    assert prepared == []


def test_a_large_text_is_indexed_in_no_time() -> None:
    """As dictionaries of tuples it took a second, and the GIL with it."""
    token_ids = [number * 7919 % 50_000 for number in range(100_000)]
    began = time.monotonic()
    index = TokenIndex(token_ids, range(2, 9))
    assert time.monotonic() - began < 0.6
    (anchor,) = suffixes(token_ids[:508], range(8, 9))
    assert index.ends(anchor).tolist() == [508, 50_508]


def test_a_preparation_is_the_same_for_whoever_uses_it() -> None:
    core = make_engine("auto")
    request = structured(None, "r", prediction=LONG)
    preparation = core.preparer.prepare(request, None)
    assert set(preparation.drafts) == {drafter.name for drafter in core.speculator.drafters}
    assert core.preparer.prepare(request, None).block_hashes == preparation.block_hashes
    for name in ("first", "second"):
        core.add(replace(request, request_id=name), preparation)
    outputs: dict[str, list[int]] = {"first": [], "second": []}
    while core.has_work:
        for output in core.step():
            outputs[output.request_id] += output.token_ids
    assert outputs["first"] == outputs["second"] == tokens_of(alone(request))


def test_what_was_not_prepared_is_not_drafted_for() -> None:
    core = make_engine("auto")
    core.add(structured(None, "r", prediction=LONG), Preparation())
    while core.has_work:
        core.step()
    assert all(figures.drafts == 0 for figures in core.metrics.drafters.values())
    assert all(figures.failures == 0 for figures in core.metrics.drafters.values())
