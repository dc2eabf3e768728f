"""Each drafter by itself: what it proposes, and what it takes notice of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from engine.config import Config
from engine.draft.draft_model import DraftLimits, DraftModel
from engine.draft.draft_prompt import encode_draft_prompt
from engine.draft.drafter import Drafter, DraftRequest
from engine.draft.ngram import NgramDrafter, SharedTexts
from engine.draft.predicted import PredictedDrafter
from engine.draft.reencoding import continuation_of, encode_behind, split_whole_characters
from engine.draft.same_vocabulary import (
    SameVocabularyDrafter,
    VocabularyMismatchError,
    check_same_vocabulary,
)
from engine.draft.suffix_index import SuffixIndex
from engine.draft.token_index import ContinuationIndex, TokenIndex, suffixes
from engine.draft.universal import UniversalDrafter
from engine.plan import StepPlan
from engine.preparation import Preparation
from engine.request import ChatPrompt, SpeculationParams, TextPrompt
from engine.sampling.coupling import CoupledSampler, InvalidDraftLogitsError
from engine.scheduling.sequence import TokenSequence
from engine.text.alignment import aligned_ids, overlap
from tests.engine.helpers import make_request, run_all, tokens_of
from tests.speculation.fakes import FakeTokenizer, TextRunner
from tests.speculation.text_engine import (
    DRAFT,
    LETTERS,
    TARGET,
    RecordingRunner,
    draft_model,
    make_engine,
    make_requests,
)

LETTER_TOKENIZER = FakeTokenizer([bytes([byte]) for byte in range(32, 127)])


def sequence_of(
    prompt: Sequence[int], output: Sequence[int] = (), *, name: str = "s", **fields: Any
) -> TokenSequence:
    request = replace(make_request(prompt, name, max_tokens=500), **fields)
    sequence = TokenSequence(request, 0.0)
    sequence.token_ids.extend(output)
    return sequence


def letters(text: str) -> list[int]:
    return LETTER_TOKENIZER.encode(text)


def prepared(drafter: Drafter, sequence: TokenSequence) -> TokenSequence:
    """The sequence with what the drafter makes of its request."""
    request = sequence.request
    prediction = LETTER_TOKENIZER.encode_plain(request.prediction or "")
    drafts = {drafter.name: drafter.preprocess(request, prediction)}
    sequence.preparation = Preparation(drafts=drafts)
    return sequence


def propose(drafter: Drafter, sequence: TokenSequence, length: int = 8) -> list[int]:
    (draft,) = drafter.propose([DraftRequest(prepared(drafter, sequence), length)])
    return list(draft.token_ids)


def text(token_ids: Sequence[int]) -> str:
    return LETTER_TOKENIZER.decode(token_ids)


class TestPredicted:
    PREDICTION = "for i in range(10): total += i; print(total)"

    def follow(self, outputs: Sequence[str], prediction: str = PREDICTION) -> list[str]:
        """Drafts of up to six tokens after each of several stretches of output."""
        drafter = PredictedDrafter()
        sequence = sequence_of(letters("?"), prediction=prediction)
        drafts = []
        for stretch in outputs:
            sequence.token_ids.extend(letters(stretch))
            drafts.append(text(propose(drafter, sequence, 6)))
        return drafts

    def test_begins_at_the_beginning_and_follows(self) -> None:
        assert self.follow(["", "for ", "i in range"]) == ["for i ", "i in r", "(10): "]

    def test_no_prediction_no_draft(self) -> None:
        drafter = PredictedDrafter()
        sequence = prepared(drafter, sequence_of(letters("?")))
        assert not drafter.can_draft(sequence)
        assert propose(drafter, sequence) == []

    @pytest.mark.parametrize(
        ("outputs", "drafts"),
        [
            (["for x", " i", "n"], ["", " in ra", " range"]),
            (["for i, j", " in"], ["", " range"]),
            (["for i range(1"], ["0): to"]),
            (["while ", "to"], ["", "tal +="]),
        ],
        ids=["replacement", "insertion", "deletion", "other beginning"],
    )
    def test_finds_its_place_again(self, outputs: list[str], drafts: list[str]) -> None:
        assert self.follow(outputs) == drafts

    def test_repeated_passage_goes_on_behind_the_old_place(self) -> None:
        prediction = "a = f(1); b = f(2); c = f(3); d = f(4);"
        assert self.follow(["a = f(1); X", " = "], prediction)[1] == "f(2); "
        assert self.follow(["a = f(1); b = f(2); X", " = "], prediction)[1] == "f(3); "

    def test_goes_back_when_nothing_follows(self) -> None:
        prediction = "alpha beta gamma"
        assert self.follow(["alpha beta gamma", " alpha"], prediction) == ["", " beta "]

    def test_longer_anchor_beats_a_nearer_one(self) -> None:
        prediction = "0123. xxend1 yyend2 abcend3"
        assert self.follow(["abcend"], prediction) == ["3"]

    def test_a_prediction_that_does_not_fit_proposes_nothing(self) -> None:
        assert self.follow(["zz", "qq", "kk"]) == ["", "", ""]

    def test_forgets(self) -> None:
        drafter = PredictedDrafter()
        sequence = sequence_of(letters("?"), letters("zz"), prediction="abc")
        assert propose(drafter, sequence) == []
        drafter.forget("s")
        fresh = sequence_of(letters("?"), prediction="abd")
        assert text(propose(drafter, fresh)) == "abd"


class TestNgram:
    def draft(self, prompt: str, output: str = "", length: int = 8, **bounds: int) -> str:
        drafter = NgramDrafter(**({"min_match": 2, "max_match": 4} | bounds))
        return text(propose(drafter, sequence_of(letters(prompt), letters(output)), length))

    def test_longest_match_wins_over_a_later_one(self) -> None:
        assert self.draft("abcdX..cdY..abcd", length=1) == "X"

    def test_most_recent_of_equal_matches_wins(self) -> None:
        assert self.draft("abX abY abZ ab", length=1) == "Z"

    def test_matches_across_prompt_and_output(self) -> None:
        assert self.draft("one two three", " one t", length=3) == "wo "

    def test_too_short_a_match_is_none(self) -> None:
        assert self.draft("aXbYcZa", min_match=2) == ""
        assert self.draft("aXbYcZa", min_match=1, length=3) == "XbY"

    def test_a_cycle_goes_on_as_it_went(self) -> None:
        assert self.draft("abcabc", length=9) == "abcabcabc"
        assert self.draft("x: aaaa", length=5) == "aaaaa"

    def test_acceptance_class_is_the_length_of_the_match(self) -> None:
        drafter = NgramDrafter(min_match=2, max_match=4)
        for prompt, acceptance_class in (("abX ab", 2), ("abcdeX abcde", 4)):
            sequence = prepared(drafter, sequence_of(letters(prompt), name=prompt))
            (draft,) = drafter.propose([DraftRequest(sequence, 4)])
            assert draft.acceptance_class == acceptance_class

    def test_index_grows_with_the_output(self) -> None:
        drafter = NgramDrafter(min_match=2, max_match=4)
        sequence = sequence_of(letters("abX "))
        assert propose(drafter, sequence) == []
        sequence.token_ids.extend(letters("abY ab"))
        assert text(propose(drafter, sequence, 1)) == "Y"

    def test_index_is_extended_not_rebuilt(self) -> None:
        class Watched(list[int]):
            lowest_read = 10**9

            def __getitem__(self, key: Any) -> Any:
                if isinstance(key, slice):
                    self.lowest_read = min(self.lowest_read, key.start)
                return super().__getitem__(key)

        tokens = Watched(letters("the quick brown fox jumps over the lazy dog " * 20))
        index = SuffixIndex(2, 4, ContinuationIndex(tokens, range(2, 5)))
        tokens.lowest_read, length = 10**9, len(tokens)
        tokens.extend(letters("again"))
        index.extend(tokens)
        assert tokens.lowest_read >= length - 4


class TestSharedTexts:
    BOUNDS: ClassVar = {"min_match": 2, "max_match": 4}

    def shared(self, max_tokens: int = 1000) -> SharedTexts:
        return SharedTexts(max_tokens=max_tokens, max_match=4)

    def add(self, shared: SharedTexts, name: str, words: str) -> None:
        token_ids = letters(words)
        shared.add(name, token_ids, SuffixIndex(2, 4, ContinuationIndex(token_ids, range(2, 5))))

    def finish(self, drafter: NgramDrafter, name: str, words: str) -> None:
        drafter.prepare([prepared(drafter, sequence_of(letters(words), name=name))])
        drafter.forget(name)

    def test_off_by_default(self) -> None:
        assert Config().speculation.ngram_shared is False
        drafter = NgramDrafter(**self.BOUNDS)
        self.finish(drafter, "a", "the secret is 1234")
        assert propose(drafter, sequence_of(letters("my secret"), name="b")) == []

    def test_other_requests_texts_are_used_when_asked_for(self) -> None:
        drafter = NgramDrafter(**self.BOUNDS, shared=self.shared())
        self.finish(drafter, "a", "the secret is 1234")
        assert text(propose(drafter, sequence_of(letters("my secret"), name="b"), 4)) == " is "

    def test_own_text_wins_a_tie_and_a_longer_match_wins_over_it(self) -> None:
        drafter = NgramDrafter(**self.BOUNDS, shared=self.shared())
        self.finish(drafter, "a", "abcdS")
        assert text(propose(drafter, sequence_of(letters("abcdO abcd"), name="b"), 1)) == "O"
        assert text(propose(drafter, sequence_of(letters("-bcdO abcd"), name="c"), 1)) == "S"

    def test_latest_of_the_longest_matches_wins(self) -> None:
        drafter = NgramDrafter(**self.BOUNDS, shared=self.shared())
        for name, words in (("a", "abcdA"), ("b", "abcdB"), ("c", "bcdC")):
            self.finish(drafter, name, words)
        assert text(propose(drafter, sequence_of(letters("abcd"), name="d"), 1)) == "B"

    def test_memory_is_bounded_and_the_oldest_go_first(self) -> None:
        shared = self.shared(max_tokens=30)
        for index in range(50):
            self.add(shared, f"r{index}", f"{index:02}abcdefgh")
        assert sum(len(words) for words, _ in shared._texts.values()) <= 30
        assert list(shared._texts) == ["r47", "r48", "r49"]

    def test_a_text_longer_than_the_bound_is_not_kept(self) -> None:
        """To keep its end would take a new index, which takes the engine's time."""
        shared = self.shared(max_tokens=10)
        self.add(shared, "a", "0123456789abcdefghij")
        assert not shared._texts
        self.add(shared, "b", "01234567")
        assert shared.find(suffixes(letters("45"), range(2, 5))) is not None

    def test_a_request_that_is_added_again_replaces_its_text(self) -> None:
        """A drafter that fails forgets its requests in the middle, and once more at their end."""
        shared = self.shared(max_tokens=30)
        for end in range(5, 20):
            self.add(shared, "same", "0123456789abcdefghij"[:end])
        self.add(shared, "other", "klmnopqr")
        assert list(shared._texts) == ["same", "other"]
        assert shared.find(suffixes(letters("gh"), range(2, 5))) is not None


class TestSameVocabulary:
    def test_padding_makes_no_difference(self) -> None:
        padded = FakeTokenizer([*LETTER_TOKENIZER.token_bytes, b"", b"", b""])
        check_same_vocabulary(padded, LETTER_TOKENIZER)
        check_same_vocabulary(LETTER_TOKENIZER, padded)

    def test_same_size_but_other_tokens_is_refused_with_the_first_difference(self) -> None:
        pieces = list(LETTER_TOKENIZER.token_bytes)
        pieces[40], pieces[41] = pieces[41], pieces[40]
        swapped = FakeTokenizer(pieces)
        with pytest.raises(VocabularyMismatchError, match=r"token 40 is b'I'.* b'H'"):
            SameVocabularyDrafter(draft_model(TARGET, LETTERS), swapped, LETTER_TOKENIZER)

    def test_more_tokens_that_mean_something_are_refused(self) -> None:
        longer = FakeTokenizer([*LETTER_TOKENIZER.token_bytes, b"", b"extra"])
        with pytest.raises(VocabularyMismatchError, match="97 tokens, the other 95"):
            check_same_vocabulary(longer, LETTER_TOKENIZER)


BYTES = [bytes([byte]) for byte in range(256)]
BYTE_LEVEL = FakeTokenizer([*BYTES, b"the ", "é".encode(), b" \xf0\x9f", b"\xa6\x8a", b"ing"])
"""Splits the fox emoji in the middle."""
WHOLE = FakeTokenizer([*BYTES, b"th", b"e ", "🦊".encode(), "é!".encode(), b"walk"])


class TestTextSync:
    @pytest.mark.parametrize(
        ("data", "whole"),
        [
            (b"abc", 3),
            ("é".encode(), 2),
            ("é".encode()[:1], 0),
            ("a🦊".encode()[:2], 1),
            ("a🦊".encode()[:4], 1),
            ("a🦊".encode(), 5),
            (b"", 0),
        ],
    )
    def test_unfinished_characters_are_split_off(self, data: bytes, whole: int) -> None:
        assert split_whole_characters(data) == (data[:whole], data[whole:])

    def test_continuation_begins_exactly_at_the_boundary(self) -> None:
        context = WHOLE.encode("the ")
        ids = continuation_of(context, "🦊é!".encode(), WHOLE)
        assert WHOLE.bytes_of(ids) == "🦊é!".encode()
        assert len(ids) == 2

    def test_no_continuation_where_tokens_would_merge_across_the_boundary(self) -> None:
        context = [*WHOLE.encode("x"), ord("w"), ord("a")]
        assert continuation_of(context, b"lk on", WHOLE) == []
        assert continuation_of(context, b"s on", WHOLE) == list(b"s on")

    def test_an_unfinished_character_behind_the_draft_is_left_out(self) -> None:
        ids = continuation_of(list(b"a"), b"b\xf0\x9f", BYTE_LEVEL)
        assert ids == list(b"b")

    def test_a_character_that_the_context_began_is_finished(self) -> None:
        context = BYTE_LEVEL.encode("a 🦊")[:-1]
        ids = continuation_of(context, b"\xa6\x8a!", BYTE_LEVEL)
        assert BYTE_LEVEL.bytes_of(ids) == b"\xa6\x8a!"

    def test_text_behind_a_context_may_merge_with_it_but_not_below_the_floor(self) -> None:
        context = [*WHOLE.encode("a "), *b"wal"]
        start, ids = encode_behind(context, b"king", WHOLE) or (0, [])
        assert WHOLE.bytes_of([*context[:start], *ids]) == b"a walking"
        assert WHOLE.encode("walk")[0] in ids
        start, ids = encode_behind(context, b"king", WHOLE, floor=5) or (0, [])
        assert (start, bytes(ids)) == (5, b"king")

    def test_window_never_reaches_over_a_control_token(self) -> None:
        tokenizer = FakeTokenizer([*BYTES, b"<end>", b"walk"], end_id=256)
        context = [*b"wa", 256, ord("l")]
        start, ids = encode_behind(context, b"k", tokenizer) or (0, [])
        assert start >= 3
        assert bytes(ids) == b"lk"

    def test_ids_beyond_the_vocabulary_end_the_window(self) -> None:
        assert continuation_of([ord("w"), 9999], b"alk", WHOLE) == list(b"alk")


class TestAlignment:
    def test_tokens_match_by_their_bytes(self) -> None:
        ids = aligned_ids(DRAFT, TARGET)
        for draft_id, target_id in enumerate(ids):
            if target_id is not None:
                assert DRAFT.token_bytes[draft_id] == TARGET.token_bytes[target_id]
        unmatched = {DRAFT.token_bytes[i] for i, target_id in enumerate(ids) if target_id is None}
        assert unmatched == {p for p in DRAFT.token_bytes if p not in TARGET.token_bytes}
        shared = len(set(DRAFT.token_bytes) & set(TARGET.token_bytes))
        assert overlap(DRAFT, TARGET) == shared / len(DRAFT.token_bytes)

    def test_ends_match_each_other_whatever_they_are_written_as(self) -> None:
        ours = FakeTokenizer([b"a", b"</s>", b"<eot>"], end_id=1, end_of_turn_id=2)
        theirs = FakeTokenizer([b"<|im_end|>", b"<|end|>", b"a"], end_id=1, end_of_turn_id=0)
        assert aligned_ids(ours, theirs) == [2, 1, 0]

    def test_control_tokens_do_not_match_text_that_looks_like_them(self) -> None:
        ours = FakeTokenizer([b"a", b"<x>"], special_ids=[1])
        theirs = FakeTokenizer([b"a", b"<x>"])
        assert aligned_ids(ours, theirs) == [0, None]


class ScriptedModel(DraftModel):
    """A draft model that writes what it is told, behind whatever it was given."""

    def __init__(self, tokenizer: FakeTokenizer, script: Sequence[int]) -> None:
        super().__init__(TextRunner(tokenizer, LETTERS), max_context=400, max_step_tokens=64)
        self.script = list(script)
        self.contexts: list[list[int]] = []

    def draft(self, requests: Any, limits: Sequence[DraftLimits], *_: Any) -> list[list[int]]:
        self.contexts = [list(tokens.token_ids) for tokens in requests]
        drafted = [self.script[: limit.max_tokens] for limit in limits]
        for tokens, ids in zip(requests, drafted, strict=True):
            tokens.token_ids.extend(ids)
        return drafted


def universal(
    script: Sequence[int],
    draft: FakeTokenizer = BYTE_LEVEL,
    target: FakeTokenizer = WHOLE,
) -> tuple[UniversalDrafter, ScriptedModel]:
    model = ScriptedModel(draft, script)
    return UniversalDrafter(model, draft, target), model


class TestUniversal:
    def test_draft_text_is_cut_into_target_tokens(self) -> None:
        drafter, model = universal(BYTE_LEVEL.encode("the 🦊 is"))
        sequence = sequence_of(WHOLE.encode("Look: "), source=TextPrompt("Look: "))
        ids = propose(drafter, sequence)
        assert ids == WHOLE.encode("the 🦊 is")[: len(ids)]
        assert model.contexts[0] == BYTE_LEVEL.encode("Look: ")

    def test_never_longer_than_asked_for(self) -> None:
        drafter, _ = universal([BYTE_LEVEL.encode("the ")[0]] * 5)
        sequence = sequence_of(WHOLE.encode("x"), source=TextPrompt("x"))
        assert propose(drafter, sequence, 3) == WHOLE.encode("the the ")[:3]

    def test_emoji_half_written_by_the_draft_is_left_out(self) -> None:
        half = BYTE_LEVEL.encode("a 🦊")[:-1]
        drafter, _ = universal(half)
        sequence = sequence_of(WHOLE.encode("x"), source=TextPrompt("x"))
        assert WHOLE.bytes_of(propose(drafter, sequence)) == b"a "

    def test_emoji_half_written_by_the_target_is_waited_for(self) -> None:
        """The committed half stays out of the draft's context; the draft must write it anew."""
        drafter, model = universal([], draft=WHOLE, target=BYTE_LEVEL)
        output = BYTE_LEVEL.encode("a 🦊")[:-1]
        sequence = sequence_of(BYTE_LEVEL.encode("x"), output, source=TextPrompt("x"))
        model.script = WHOLE.encode(" 🦊!")[1:]
        ids = propose(drafter, sequence)
        assert WHOLE.bytes_of(model.contexts[0]) == b"xa "
        assert BYTE_LEVEL.bytes_of(ids) == "🦊!".encode()[2:]

    def test_draft_that_contradicts_the_half_character_is_dropped(self) -> None:
        drafter, model = universal([], draft=WHOLE, target=BYTE_LEVEL)
        output = BYTE_LEVEL.encode("a 🦊")[:-1]
        sequence = sequence_of(BYTE_LEVEL.encode("x"), output, source=TextPrompt("x"))
        model.script = WHOLE.encode("é!")
        assert propose(drafter, sequence) == []

    def test_followed_output_is_retokenised_and_right_drafts_stay(self) -> None:
        drafter, model = universal([BYTE_LEVEL.encode("the ")[0]])
        sequence = sequence_of(WHOLE.encode("x"), source=TextPrompt("x"))
        assert WHOLE.bytes_of(propose(drafter, sequence)) == b"the "
        sequence.token_ids.extend(WHOLE.encode("the "))
        propose(drafter, sequence)
        assert model.contexts[0] == BYTE_LEVEL.encode("xthe ")

    def test_wrong_drafts_are_taken_back(self) -> None:
        drafter, model = universal(BYTE_LEVEL.encode("the ing"))
        sequence = sequence_of(WHOLE.encode("x"), source=TextPrompt("x"))
        propose(drafter, sequence)
        sequence.token_ids.extend(WHOLE.encode("that"))
        propose(drafter, sequence)
        assert BYTE_LEVEL.bytes_of(model.contexts[0]) == b"xthat"

    def test_control_token_in_the_output_ends_drafting_for_good(self) -> None:
        target = FakeTokenizer([*BYTES, b"<tool>"], special_ids=[256])
        drafter, _ = universal(list(b"abc"), target=target)
        sequence = sequence_of(list(b"x"), source=TextPrompt("x"))
        assert propose(drafter, sequence) == list(b"abc")
        sequence.token_ids.extend([*b"abc", 256])
        assert propose(drafter, sequence) == []
        assert not drafter.can_draft(sequence)
        drafter.forget("s")

    def test_text_in_front_of_a_control_token_of_the_draft_is_used(self) -> None:
        draft = FakeTokenizer([*BYTES, b"<tool>"], special_ids=[256])
        drafter, _ = universal([*b"ab", 256, *b"cd"], draft=draft)
        sequence = sequence_of(list(b"x"), source=TextPrompt("x"))
        assert propose(drafter, sequence) == list(b"ab")

    @pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
    def test_end_of_the_draft_becomes_the_targets(self, chat: bool) -> None:
        draft = FakeTokenizer([*BYTES, b"</s>"], end_id=256, template="{content}")
        target = FakeTokenizer(
            [*BYTES, b"<end>", b"<turn>"], end_id=256, end_of_turn_id=257, template="{content}"
        )
        source = ChatPrompt(({"role": "user", "content": "x"},)) if chat else TextPrompt("x")
        drafter, _ = universal([*b"ok", 256], draft, target)
        sequence = sequence_of(list(b"x"), source=source)
        assert propose(drafter, sequence) == [*b"ok", 257 if chat else 256]

    def test_no_end_behind_text_that_could_not_be_translated(self) -> None:
        draft = FakeTokenizer([*BYTES, b"</s>"], end_id=256)
        drafter, _ = universal([*b"ok\xf0", 256], draft, FakeTokenizer([*BYTES, b"E"], end_id=256))
        sequence = sequence_of(list(b"x"), source=TextPrompt("x"))
        assert propose(drafter, sequence) == list(b"ok")

    def test_chat_goes_through_the_drafts_own_template(self) -> None:
        chat = ChatPrompt(({"role": "user", "content": "hi"},))
        own = FakeTokenizer(BYTES, template="[{role}] {content}")
        assert bytes(encode_draft_prompt(chat, own)) == b"[user] hi"

    @pytest.mark.parametrize("template", [None, ""], ids=["no template", "refused"])
    def test_plain_conversation_where_the_template_does_not_serve(
        self, template: str | None
    ) -> None:
        chat = ChatPrompt(({"role": "user", "content": "hi"},))
        other = FakeTokenizer(BYTES, template=template)
        assert bytes(encode_draft_prompt(chat, other)) == b"user: hi\n\nassistant: "

    def test_prompt_with_ids_the_draft_model_lacks_gets_no_drafts(self) -> None:
        """An added token beyond the embedding, as Gemma's tokenizer has one."""
        draft = FakeTokenizer([*BYTES, b"<image>"])
        model = ScriptedModel(FakeTokenizer(BYTES), list(b"abc"))
        drafter = UniversalDrafter(model, draft, WHOLE)
        sequence = sequence_of(WHOLE.encode("x"), source=TextPrompt("see <image>"))
        assert propose(drafter, sequence) == []
        assert not drafter.can_draft(sequence)


def sampler(sequence: TokenSequence) -> CoupledSampler:
    return CoupledSampler([sequence])


class TestDraftModel:
    def model(self, num_blocks: int = 16, **options: Any) -> tuple[DraftModel, RecordingRunner]:
        runner = RecordingRunner(TARGET, LETTERS, num_blocks=num_blocks)
        return DraftModel(runner, **({"max_context": 60, "max_step_tokens": 64} | options)), runner

    def continue_(self, model: DraftModel, tokens: Any, length: int = 4) -> list[int]:
        sequence = sequence_of(tokens.token_ids)
        (drafted,) = model.draft([tokens], [DraftLimits(length)], sampler(sequence), frozenset())
        return drafted

    def rows(self, runner: RecordingRunner) -> int:
        return runner.last_chunks[""].num_tokens

    def test_equal_prefixes_are_computed_once(self) -> None:
        model, runner = self.model()
        prompt = TARGET.encode("abcdefgh" * 2 + "aceg")
        first = model.start(model.prepare_prompt(prompt))
        answer = self.continue_(model, first, 1)
        assert self.rows(runner) == len(prompt)
        second = model.start(model.prepare_prompt(prompt))
        assert self.continue_(model, second, 1) == answer
        assert self.rows(runner) <= runner.block_size
        model.free(first)
        model.free(second)
        assert model.pool.num_free == model.pool.num_blocks
        assert model.start(model.prepare_prompt(prompt)).num_computed > 0

    def test_rewriting_keeps_what_stays_the_same(self) -> None:
        model, _ = self.model()
        tokens = model.start(model.prepare_prompt(TARGET.encode("abab")))
        drafted = self.continue_(model, tokens)
        length = len(tokens.token_ids)
        kept = tokens.token_ids[:-2]
        tokens.rewrite(0, [*kept, drafted[0]])
        assert tokens.num_computed >= len(kept) - 1
        assert tokens.num_uncomputed_tokens <= 2
        self.continue_(model, tokens, 1)
        assert len(tokens.token_ids) == length

    def test_least_recently_used_is_evicted_and_comes_back(self) -> None:
        model, _ = self.model(num_blocks=16)
        prompts = [TARGET.encode(letter * 16) for letter in "abcdefg"]
        alone = []
        for prompt in prompts:
            fresh, _ = self.model()
            alone.append(self.continue_(fresh, fresh.start(fresh.prepare_prompt(prompt))))
        holders = [model.start(model.prepare_prompt(prompt)) for prompt in prompts]
        first_time = [self.continue_(model, holder) for holder in holders]
        assert first_time == alone
        assert not holders[0].block_ids
        assert holders[0].num_computed == 0
        assert holders[-1].block_ids
        holders[0].rewrite(len(prompts[0]), [])
        assert self.continue_(model, holders[0]) == alone[0]
        assert not holders[2].block_ids
        model.pool.check_integrity()

    def test_no_draft_when_the_others_of_the_step_need_the_blocks(self) -> None:
        model, _ = self.model(num_blocks=8)
        prompts = [TARGET.encode(letter * 20) for letter in "abc"]
        holders = [model.start(model.prepare_prompt(prompt)) for prompt in prompts]
        sequences = [sequence_of(prompt) for prompt in prompts]
        drafted = model.draft(holders, [DraftLimits(4)] * 3, CoupledSampler(sequences), frozenset())
        assert [len(ids) for ids in drafted] == [4, 0, 0]
        model.pool.check_integrity()

    def test_long_prompts_are_caught_up_with_over_several_steps(self) -> None:
        model, runner = self.model(max_step_tokens=8)
        prompt = TARGET.encode("ah" * 16)
        tokens = model.start(model.prepare_prompt(prompt))
        assert model.needs_prefill(tokens)
        assert self.continue_(model, tokens) == []
        passes = 0
        while model.needs_prefill(tokens):
            model.prefill([tokens])
            assert self.rows(runner) <= 8
            passes += 1
        assert passes == -(-len(prompt) // 8) - 1
        assert self.continue_(model, tokens) != []

    def test_drafting_stops_at_a_stop_token_and_below_the_certainty(self) -> None:
        model, _ = self.model()
        prompt = TARGET.encode("abab")
        free = self.continue_(model, model.start(model.prepare_prompt(prompt)), 6)
        tokens, sequence = model.start(model.prepare_prompt(prompt)), sequence_of(prompt)
        limits = [DraftLimits(6)]
        (stopped,) = model.draft([tokens], limits, sampler(sequence), frozenset({free[2]}))
        assert stopped == free[: free.index(free[2]) + 1]
        (unsure,) = model.draft(
            [model.start(model.prepare_prompt(prompt))],
            [DraftLimits(6, min_confidence=1.1)],
            sampler(sequence),
            frozenset(),
        )
        assert unsure == free[:1]

    def test_blocks_behind_invalid_logits_are_reused_by_nobody(self) -> None:
        """A NaN of one request stays its own: the others' drafts are from clean blocks."""
        model, runner = self.model()
        prompts = [TARGET.encode("abcdefgh" * 2), TARGET.encode("hgfedcba" * 2)]
        clean = [
            self.continue_(model, model.start(model.prepare_prompt(prompt))) for prompt in prompts
        ]
        spoilt, spared = (TARGET.encode(text * 2) for text in ("aceg" * 2, "gaca" * 2))
        execute = runner.execute

        def spoil(plan: StepPlan) -> torch.Tensor:
            logits = execute(plan)
            logits[0, 3] = torch.nan
            return logits

        holders = [model.start(model.prepare_prompt(prompt)) for prompt in (spoilt, spared)]
        model.prefill(holders)
        assert all(holder.num_published for holder in holders)
        runner.execute = spoil  # type: ignore[method-assign]
        sequences = [sequence_of(prompt) for prompt in (spoilt, spared)]
        with pytest.raises(InvalidDraftLogitsError, match="invalid logits") as raised:
            model.draft(holders, [DraftLimits(4)] * 2, CoupledSampler(sequences), frozenset())
        assert raised.value.rows == (0,)
        for holder in holders:
            model.free(holder)
        model.pool.check_integrity()
        runner.execute = execute  # type: ignore[method-assign]
        cached = [model.start(model.prepare_prompt(p)).num_computed > 0 for p in (spoilt, spared)]
        assert cached == [False, True]
        for prompt, expected in zip(prompts, clean, strict=True):
            tokens = model.start(model.prepare_prompt(prompt))
            assert tokens.num_computed > 0, "what others computed still is"
            assert self.continue_(model, tokens) == expected

    def test_context_is_bounded_by_the_model_and_by_memory(self) -> None:
        model, _ = self.model()
        assert (model.has_room(60), model.has_room(61)) == (True, False)
        small, _ = self.model(num_blocks=4)
        assert (small.has_room(16), small.has_room(17)) == (True, False)


class TestSameVocabularyDrafter:
    def test_ids_that_only_the_target_has_end_drafting(self) -> None:
        """A padded target may be given, or sample, an id that the draft has no embedding for."""
        drafter = SameVocabularyDrafter(draft_model(TARGET, LETTERS), TARGET, TARGET)
        good = sequence_of(TARGET.encode("abab"), name="good")
        bad = sequence_of([*TARGET.encode("abab"), len(TARGET.token_bytes) + 7], name="bad")
        for sequence in (good, bad):
            prepared(drafter, sequence)
        drafts = drafter.propose([DraftRequest(bad, 4), DraftRequest(good, 4)])
        assert drafts[0].token_ids == ()
        assert len(drafts[1].token_ids) == 4
        assert not drafter.can_draft(bad)
        assert drafter.can_draft(good)
        good.token_ids.append(len(TARGET.token_bytes))
        assert propose(drafter, good) == []
        for name in ("good", "bad"):
            drafter.forget(name)
        assert drafter.model.pool.num_free == drafter.model.pool.num_blocks


class TestLossyAcceptance:
    def run(self, top_k: int | None) -> tuple[Any, dict[str, Any]]:
        core = make_engine("model", salt=3, will=2.0)
        requests = [
            replace(request, speculation=SpeculationParams(accept_top_k=top_k))
            for request in make_requests(temperature=0.9)
        ]
        return core, run_all(core, requests)

    def test_off_by_default(self) -> None:
        assert SpeculationParams().accept_top_k is None
        core, _ = self.run(None)
        assert core.metrics.lossy_accepted_tokens == 0

    def test_top_1_of_a_greedy_request_is_lossless(self) -> None:
        plain = run_all(make_engine("plain"), make_requests())
        core = make_engine("model")
        lossy = [
            replace(request, speculation=SpeculationParams(accept_top_k=1))
            for request in make_requests()
        ]
        outputs = run_all(core, lossy)
        assert {n: tokens_of(o) for n, o in outputs.items()} == {
            n: tokens_of(o) for n, o in plain.items()
        }
        assert core.metrics.lossy_accepted_tokens == 0

    def test_more_is_accepted_and_counted(self) -> None:
        strict, plain = self.run(None)
        lossy, outputs = self.run(4)
        assert lossy.metrics.lossy_accepted_tokens > 0
        assert (
            lossy.metrics.drafters["model"].accepted_tokens
            > strict.metrics.drafters["model"].accepted_tokens
        )
        assert {n: tokens_of(o) for n, o in outputs.items()} != {
            n: tokens_of(o) for n, o in plain.items()
        }

    def test_accepted_tokens_are_the_targets_own_or_in_its_top_k(self) -> None:
        """Log-probabilities list each token's rank among the likeliest."""
        top_k = 3
        core = make_engine("model", salt=3, will=2.0)
        requests = [
            replace(request, speculation=SpeculationParams(accept_top_k=top_k))
            for request in make_requests(temperature=0.0, logprobs=top_k)
        ]
        outputs = run_all(core, requests)
        assert core.metrics.lossy_accepted_tokens > 0
        for steps in outputs.values():
            for entry in (entry for step in steps for entry in step.logprobs):
                assert entry.token_id in {token_id for token_id, _, _ in entry.top}


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 50, 400, 5000])
def test_indexes_find_what_a_scan_finds(num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    text = rng.integers(0, 4, num_tokens).tolist()
    every, last = (index(text, range(2, 9)) for index in (TokenIndex, ContinuationIndex))
    for _ in range(30):
        query = rng.integers(0, 4, 10).tolist()
        for ngram in suffixes(query, range(2, 9)):
            length, wanted = len(ngram.token_ids), list(ngram.token_ids)
            assert wanted == query[-length:]
            ends = [e for e in range(length, num_tokens + 1) if text[e - length : e] == wanted]
            assert every.ends(ngram).tolist() == ends
            assert last.find(ngram) == max((e for e in ends if e < num_tokens), default=None)
