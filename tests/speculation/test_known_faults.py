"""Faults that other servers with speculative decoding are known for, one test each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.models.memory
from engine.build import load_parts
from engine.config import Config, ConfigError, KvConfig
from engine.draft.drafter import Draft, DraftRequest, FreeDrafter
from engine.models.torch_runner import TorchRunner
from engine.request import FinishReason, GenerationRequest
from tests.engine.helpers import run_all, text_of, tokens_of
from tests.speculation.simulated_server import SimulatedServer, memory_bound
from tests.speculation.text_engine import (
    DRAFTINGS,
    ENDING,
    LETTERS,
    TARGET,
    answers,
    make_engine,
    make_requests,
)
from tests.tiny_models import make_tiny_model

TARGET_PASS = memory_bound(0.030, 0.004)
DRAFT_PASS = memory_bound(0.003, 0.0003)
NOT_SLOWER = 0.97

SPECULATING = [drafting for drafting in DRAFTINGS if drafting != "predicted"]
"""Predictions belong to requests; see `test_golden_features`."""
speculating = pytest.mark.parametrize("drafting", SPECULATING)


class ScriptedDrafter(FreeDrafter):
    """Proposes what it is told, whatever the target thinks of it."""

    name = "scripted"

    def __init__(
        self, script: Sequence[int], *, behind: dict[str, list[int]] | None = None
    ) -> None:
        """
        Args:
            behind: the true answers by request id; proposed first, as far as they go.
        """
        self._script = list(script)
        self._behind = behind or {}
        self.num_proposed = 0

    def propose_one(self, request: DraftRequest) -> Draft:
        self.num_proposed += 1
        sequence = request.sequence
        rest = self._behind.get(sequence.request_id, [])[sequence.num_output :]
        return Draft((*rest, *self._script)[: request.max_tokens])


def plain_tokens(
    requests: Sequence[GenerationRequest], alphabet: str = LETTERS
) -> dict[str, list[int]]:
    outputs = run_all(make_engine("plain", alphabet), requests)
    return {name: tokens_of(steps) for name, steps in outputs.items()}


class TestHighConcurrency:
    """Speculation makes a busy server slower."""

    def test_one_request_drafts_and_many_do_not(self) -> None:
        alone = SimulatedServer(TARGET_PASS, DRAFT_PASS).run(300, 0.75)
        assert alone.speed_up > 1.3
        assert alone.mean_length > 2
        busy = SimulatedServer(TARGET_PASS, DRAFT_PASS, num_running=24)
        busy.run(100, 0.75)
        settled = busy.run(200, 0.75)
        assert settled.mean_length < 0.3
        assert settled.speed_up > NOT_SLOWER

    def test_drafting_comes_back_when_the_load_is_gone(self) -> None:
        server = SimulatedServer(TARGET_PASS, DRAFT_PASS, num_running=24)
        server.run(150, 0.75)
        for name in server.requests[1:]:
            server.policy.forget(name)
        del server.requests[1:]
        server.run(20, 0.75)
        assert server.run(200, 0.75).speed_up > 1.3


class TestAcceptanceCollapse:
    """On long prompts, or at a high temperature, drafts are no longer accepted."""

    @pytest.mark.parametrize(("num_running", "length"), [(1, 2.0), (4, 0.7)])
    def test_drafting_shrinks_and_comes_back(self, num_running: int, length: float) -> None:
        server = SimulatedServer(TARGET_PASS, DRAFT_PASS, num_running=num_running)
        server.run(50, 0.8)
        easy = server.run(150, 0.8)
        server.run(60, 0.05)
        hard = server.run(200, 0.05)
        assert easy.mean_length > length
        assert easy.speed_up > 1.2
        assert hard.mean_length < 0.5
        assert hard.speed_up > NOT_SLOWER
        server.run(600, 0.8)
        again = server.run(150, 0.8)
        assert again.mean_length > 0.6 * easy.mean_length
        assert again.speed_up > 0.9 * easy.speed_up

    @pytest.mark.parametrize("acceptance", [0.02, 0.15, 0.3])
    def test_creative_text_is_never_slower(self, acceptance: float) -> None:
        server = SimulatedServer(TARGET_PASS, DRAFT_PASS)
        server.run(60, acceptance)
        assert server.run(1500, acceptance).speed_up > NOT_SLOWER


class TestSlowDraft:
    """A draft model nearly as slow as the target."""

    @pytest.mark.parametrize("share", [0.6, 1.0])
    def test_it_is_not_used(self, share: float) -> None:
        server = SimulatedServer(TARGET_PASS, lambda rows: share * TARGET_PASS(rows))
        server.run(60, 0.6)
        settled = server.run(500, 0.6)
        assert settled.mean_length < 0.3
        assert settled.speed_up > NOT_SLOWER


class TestVocabularyOfEqualSize:
    """A draft with another vocabulary of the same size corrupts the output without a word."""

    def test_it_is_refused_with_the_first_token_that_differs(
        self, tiny_model_dir: Path, tmp_path: Path
    ) -> None:
        size = json.loads((tiny_model_dir / "config.json").read_text())["vocab_size"]
        other = make_tiny_model(tmp_path / "other", style="sentencepiece", vocab_size=size, steps=0)
        assert json.loads((other / "config.json").read_text())["vocab_size"] == size
        with pytest.raises(ConfigError, match=r"model_draft: token \d+ is b'.*' in the draft and"):
            load_parts(
                Config(
                    model=str(tiny_model_dir), model_draft=str(other), runner="torch", device="cpu"
                )
            )


class TestPenalties:
    """Penalties crash under speculation, or are ignored, or see only what is committed."""

    @speculating
    def test_every_row_of_a_draft_sees_the_tokens_before_it(self, drafting: str) -> None:
        without = plain_tokens(make_requests())
        requests = make_requests(frequency_penalty=1.2, presence_penalty=0.5)
        expected = plain_tokens(requests)
        assert expected != without
        core = make_engine(drafting)
        outputs = run_all(core, requests)
        assert {name: tokens_of(steps) for name, steps in outputs.items()} == expected

    def test_a_repetition_inside_the_draft_is_penalised(self) -> None:
        """Token after token of one draft: each must count the ones before it."""
        token = TARGET.encode("a")[0]
        requests = make_requests(
            logit_bias={token: 30.0}, frequency_penalty=6.0, max_tokens=16, temperature=0.0
        )
        core = make_engine("plain", drafters=[ScriptedDrafter([token] * 8)])
        outputs = run_all(core, requests)
        tokens = {name: tokens_of(steps) for name, steps in outputs.items()}
        assert tokens == plain_tokens(requests)
        for answer in tokens.values():
            assert 3 <= answer.count(token) <= 8
        assert core.metrics.drafters["scripted"].accepted_tokens > 0


class TestBiasAndMinP:
    """min_p or logit_bias reach only the last token of a draft."""

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_banned_token_is_accepted_nowhere(self, temperature: float) -> None:
        banned = TARGET.encode("c")[0]
        requests = make_requests(logit_bias={banned: -100.0}, temperature=temperature)
        truth = plain_tokens(requests)
        core = make_engine("plain", drafters=[ScriptedDrafter([banned] * 8)])
        outputs = run_all(core, requests)
        assert core.metrics.drafters["scripted"].draft_tokens > 0
        assert core.metrics.drafters["scripted"].accepted_tokens == 0
        assert {name: tokens_of(steps) for name, steps in outputs.items()} == truth
        assert not any(banned in answer for answer in truth.values())

    def test_min_p_cuts_at_every_position(self) -> None:
        """With min_p = 1 only the likeliest token is left, whatever the temperature."""
        greedy = plain_tokens(make_requests())
        requests = make_requests(temperature=1.5, min_p=1.0)
        core = make_engine("model")
        outputs = run_all(core, requests)
        assert {name: tokens_of(steps) for name, steps in outputs.items()} == greedy
        assert core.metrics.drafters["model"].accepted_tokens > 0


class TestLogprobs:
    """Every logprob is 0.0, or only a step's first is returned."""

    @speculating
    def test_each_token_has_its_own(self, drafting: str) -> None:
        requests = make_requests(logprobs=2, temperature=0.8)
        core = make_engine(drafting)
        outputs = run_all(core, requests)
        assert core.metrics.target_passes < core.metrics.generated_tokens
        expected = answers(run_all(make_engine("plain"), requests))
        assert answers(outputs) == expected
        for steps in outputs.values():
            entries = [entry for step in steps for entry in step.logprobs]
            assert [entry.token_id for entry in entries] == tokens_of(steps)
            assert all(entry.logprob < 0.0 for entry in entries)
            assert len({entry.logprob for entry in entries}) > len(entries) / 2


class TestSeeds:
    """A request's seed is ignored, or depends on its neighbours."""

    @speculating
    def test_equal_seeds_agree_and_different_ones_do_not(self, drafting: str) -> None:
        (request,) = make_requests(1, temperature=1.2)
        seeds = [5, 6, 5, 7, 5]
        requests = [
            replace(request, request_id=f"s{i}", params=replace(request.params, seed=seed))
            for i, seed in enumerate(seeds)
        ]
        outputs = run_all(make_engine(drafting), requests)
        texts = [tuple(tokens_of(outputs[f"s{i}"])) for i in range(len(seeds))]
        assert texts[0] == texts[2] == texts[4]
        assert len(set(texts)) == 3


class TestStops:
    """Token ids and logprobs leak past a stop string that a draft runs over."""

    @pytest.mark.parametrize("length", [1, 3])
    def test_nothing_of_a_step_behind_the_stop_is_told(self, length: int) -> None:
        truth = plain_tokens(make_requests())
        requests = []
        for request in make_requests(logprobs=1):
            stop = TARGET.decode(truth[request.request_id])[20 : 20 + length]
            requests.append(replace(request, params=replace(request.params, stop=(stop,))))
        core = make_engine("plain", drafters=[ScriptedDrafter([], behind=truth)])
        outputs = run_all(core, requests)
        for request in requests:
            steps, (stop,) = outputs[request.request_id], request.params.stop
            tokens = tokens_of(steps)
            assert stop in TARGET.decode(tokens)
            assert stop not in TARGET.decode(tokens[:-1])
            assert stop not in text_of(steps)
            assert len([entry for step in steps for entry in step.logprobs]) == len(tokens)
            assert steps[-1].usage.completion_tokens == len(tokens)
            assert steps[-1].finish_reason is FinishReason.STOP


class TestFinishReason:
    """A wrong finish_reason when max_tokens falls into a draft."""

    @pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7])
    def test_it_is_length(self, max_tokens: int) -> None:
        truth = plain_tokens(make_requests())
        requests = make_requests(max_tokens=max_tokens)
        core = make_engine("plain", drafters=[ScriptedDrafter([], behind=truth)])
        for name, steps in run_all(core, requests).items():
            assert steps[-1].finish_reason is FinishReason.LENGTH
            assert tokens_of(steps) == truth[name][:max_tokens]

    def test_it_is_stop_when_the_end_is_the_last_token_allowed(self) -> None:
        truth = plain_tokens(make_requests(8), ENDING)
        ended = {name: ids for name, ids in truth.items() if ids[-1] in TARGET.eos_ids}
        assert len(ended) >= 3
        for request in make_requests(8):
            if request.request_id in ended:
                answer = ended[request.request_id]
                limit = replace(request.params, max_tokens=len(answer))
                drafters = [ScriptedDrafter([1, 1], behind=truth)]
                core = make_engine("plain", ENDING, drafters=drafters)
                (steps,) = run_all(core, [replace(request, params=limit)]).values()
                assert steps[-1].finish_reason is FinishReason.STOP
                assert tokens_of(steps) == answer


class TestEndOfTurn:
    """Text that a draft has behind the end of the turn comes out."""

    def test_nothing_comes_behind_it(self) -> None:
        requests = make_requests(8)
        truth = plain_tokens(requests, ENDING)
        behind = TARGET.encode("abc")
        core = make_engine("plain", ENDING, drafters=[ScriptedDrafter(behind, behind=truth)])
        outputs = run_all(core, requests)
        assert {name: tokens_of(steps) for name, steps in outputs.items()} == truth
        ended = [n for n, s in outputs.items() if s[-1].finish_reason is FinishReason.STOP]
        assert len(ended) >= 3
        for name in ended:
            assert text_of(outputs[name]) == TARGET.decode(truth[name][:-1])


class TestPreemption:
    """A preempted request goes on with what it or another left in the cache."""

    @speculating
    def test_output_is_not_stale(self, drafting: str) -> None:
        requests = make_requests(10, temperature=0.8)
        core = make_engine(drafting, num_blocks=40)
        outputs = run_all(core, requests)
        assert core.metrics.preemptions > 1
        assert {name: tokens_of(steps) for name, steps in outputs.items()} == plain_tokens(requests)


class TestPrefixCache:
    """Prefix-cache hits get lost under speculation, or rejected drafts get into the cache."""

    @speculating
    def test_hits_are_those_of_plain_decoding(self, drafting: str) -> None:
        def cached(engine_kind: str) -> dict[str, int]:
            core = make_engine(engine_kind)
            first = run_all(core, make_requests())
            # Later turns: the whole first answer is part of the prompt.
            turns = [
                replace(
                    request,
                    request_id=f"{request.request_id}-2",
                    prompt_token_ids=(
                        *request.prompt_token_ids,
                        *tokens_of(first[request.request_id]),
                    ),
                )
                for request in make_requests()
            ]
            second = run_all(core, turns)
            if engine_kind != "plain":
                alone = {
                    t.request_id: run_all(make_engine("plain"), [t])[t.request_id] for t in turns
                }
                assert answers(second) == answers(alone)
            return {name: steps[-1].usage.cached_tokens for name, steps in second.items()}

        hits = cached(drafting)
        assert sum(hits.values()) > 200
        assert hits == cached("plain")


class TestDraftMemory:
    """The draft's memory is not counted: the server dies at start without saying why."""

    def config(self, tiny_model_dir: Path, tiny_draft_dir: Path) -> Config:
        return Config(
            model=str(tiny_model_dir),
            draft=str(tiny_draft_dir),
            runner="torch",
            device="cpu",
            kv=KvConfig(memory_mib=300, draft_memory_mib=200),
        )

    def test_too_little_main_memory_is_told_with_the_sizes(
        self, tiny_model_dir: Path, tiny_draft_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = iter([400 << 20, 5 << 20])
        monkeypatch.setattr(engine.models.memory, "free_bytes", lambda: next(free))
        with pytest.raises(
            ConfigError,
            match=r"^kv.draft_memory_mib: the KV blocks of tiny-draft take \d+ MiB of the 200 MiB "
            r"allowed, but only 5 MiB of memory are free$",
        ):
            load_parts(self.config(tiny_model_dir, tiny_draft_dir))

    def test_too_little_gpu_memory_is_told_with_the_sizes(
        self, tiny_model_dir: Path, tiny_draft_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = TorchRunner.load

        def load_or_fail(folder: Path, **options: Any) -> TorchRunner:
            if folder == tiny_draft_dir:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return load(folder, **options)

        monkeypatch.setattr(TorchRunner, "load", load_or_fail)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (77 << 20, 8000 << 20))
        with pytest.raises(
            ConfigError,
            match=r"^kv.gpu_memory_fraction: tiny-draft .* 0.85 .* 77 of 8000 MiB of GPU memory",
        ):
            load_parts(self.config(tiny_model_dir, tiny_draft_dir))

    def test_free_memory_is_the_least_of_machine_and_container(self, tmp_path: Path) -> None:
        meminfo = tmp_path / "meminfo"
        meminfo.write_text("MemTotal: 900 kB\nMemAvailable:    500 kB\n")
        assert engine.models.memory.free_bytes(meminfo, tmp_path) == 500 << 10
        for name, value in (("max", "400000"), ("current", "300000")):
            (tmp_path / f"memory.{name}").write_text(f"{value}\n")
        assert engine.models.memory.free_bytes(meminfo, tmp_path) == 100_000
        (tmp_path / "memory.stat").write_text("anon 5\nactive_file 30\ninactive_file 20\n")
        assert engine.models.memory.free_bytes(meminfo, tmp_path) == 100_050
        (tmp_path / "memory.max").write_text("max\n")
        assert engine.models.memory.free_bytes(meminfo, tmp_path) == 500 << 10
        assert engine.models.memory.free_bytes(tmp_path / "none", tmp_path / "none") is None
