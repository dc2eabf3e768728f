"""The doctor: its arithmetic on figures made up, its measurements on tiny models."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, ConfigError
from engine.doctor.acceptance import Acceptance
from engine.doctor.advice import advise
from engine.doctor.divergence import Divergence
from engine.doctor.examine import examine, num_stages
from engine.doctor.pair import ModelPair, load_pair
from engine.doctor.report import Costs, Report
from engine.request import ChatPrompt, TextPrompt
from server.cli.main import main
from tests.tiny_models import sentences

FLAT = {rows: 30.0 + rows for rows in range(1, 10)}
FAST = dict.fromkeys(range(1, 10), 3.0)


def geometric(rate: float, temperature: float = 0.0, drafts: int = 1000) -> Acceptance:
    """Eight-token drafts whose tokens are each right with the same chance."""
    acceptance, alive = Acceptance(temperature, asked=drafts), float(drafts)
    for accepted in range(8):
        failed = round(alive * (1 - rate))
        acceptance.drafts += [(8, accepted)] * failed
        alive -= failed
    acceptance.drafts += [(8, 8)] * round(alive)
    return acceptance


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "target": "big",
        "draft": "small",
        "drafter": "universal",
        "vocabulary_overlap": 0.7,
        "divergence": Divergence(100, 0.4, 0.2, 0.8),
        "acceptance": (geometric(0.8), geometric(0.75, 0.7), geometric(0.7, 1.0)),
        "argmax_acceptance": (),
        "raw_text_acceptance": geometric(0.8),
        "chat_acceptance": geometric(0.8),
        "costs": Costs(FLAT, FAST),
    }
    return Report(**(fields | changes))


class TestArithmetic:
    def test_acceptance_by_position_counts_drafts_that_got_there(self) -> None:
        acceptance = Acceptance(0.0, asked=5, drafts=[(3, 3), (3, 1), (1, 1), (2, 0)])
        assert acceptance.by_position == [3 / 4, 1 / 2, 1.0]
        assert acceptance.rate == 5 / 9

    def test_rate_looks_at_the_first_five_tokens(self) -> None:
        assert Acceptance(0.0, 2, [(8, 8), (8, 2)]).rate == 7 / 10

    def test_tokens_a_pass_count_drafts_that_came_to_nothing(self) -> None:
        acceptance = Acceptance(0.0, asked=4, drafts=[(4, 4), (4, 1)])
        assert [acceptance.tokens_a_pass(k) for k in (0, 1, 2, 8)] == [1.0, 1.5, 1.75, 2.25]

    def test_speed_up_is_tokens_by_time(self) -> None:
        costs = Costs({1: 30.0, 2: 32.0, 3: 34.0} | FLAT, {1: 2.0, 3: 4.0} | FAST)
        costs = Costs(costs.target_ms | {1: 30.0, 3: 40.0}, costs.draft_ms | {1: 2.0, 3: 4.0})
        assert costs.step_ms(2) == 4.0 + 2.0 + 40.0
        assert costs.step_ms(0) == 30.0
        acceptance = Acceptance(0.0, asked=10, drafts=[(8, 2)] * 10)
        assert report(costs=costs).speed_up(acceptance, 2) == pytest.approx(3 * 30 / 46)

    def test_best_length_grows_with_acceptance_and_is_0_where_drafting_does_not_pay(self) -> None:
        lengths = [report().best_length(geometric(rate)) for rate in (0.02, 0.4, 0.7, 0.95)]
        assert lengths[0] == 0
        assert lengths == sorted(lengths)
        assert lengths[-1] >= 6


class TestAdvice:
    def test_a_good_pair_gets_a_verdict_only(self) -> None:
        (verdict,) = advise(report())
        best = report().best_length(report().acceptance[0])
        assert verdict.startswith(f"Drafting {best} tokens is expected to decode ")

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"costs": Costs(FLAT, dict.fromkeys(FLAT, 25.0))}, "draft is too slow"),
            ({"costs": Costs({n: 10.0 * n for n in FLAT}, FAST)}, "9.0 times one of 1 row"),
            ({"acceptance": (geometric(0.1),) * 4}, "does not pay"),
            (
                {
                    "acceptance": (geometric(0.3),) * 4,
                    "divergence": Divergence(100, 2.5, 2.0, 0.3),
                },
                r"too far apart.*2\.50 nats",
            ),
            ({"acceptance": (geometric(0.9), geometric(0.3, 1.0))}, "Temperature 1 is too high"),
            ({"chat_acceptance": geometric(0.2)}, "template mismatch"),
            ({"vocabulary_overlap": 0.1}, "Only 10% of the draft's tokens"),
        ],
    )
    def test_what_is_wrong_is_named(self, changes: dict[str, Any], words: str) -> None:
        advice = advise(report(**changes))
        assert any(re.search(words, sentence) for sentence in advice), advice


def config(target: Path, draft: Path | None, **changes: Any) -> Config:
    return Config(
        model=str(target),
        draft=None if draft is None else str(draft),
        runner="torch",
        device="cpu",
        **changes,
    )


SOURCES = [
    ChatPrompt(({"role": "user", "content": sentences(2, 1)},)),
    TextPrompt(sentences(3, 2)[:-4]),
    TextPrompt(sentences(5, 3)[:-9]),
]


def examined(pair: ModelPair, **options: Any) -> tuple[Report, list[str]]:
    stages: list[str] = []
    found = examine(pair, SOURCES, max_tokens=24, on_progress=stages.append, **options)
    return found, stages


def test_a_model_is_its_own_perfect_draft(tiny_model_dir: Path) -> None:
    pair = load_pair(config(tiny_model_dir, tiny_model_dir))
    assert pair.drafter.name == "model"
    found, _ = examined(pair)
    assert found.vocabulary_overlap == 1.0
    assert found.divergence is not None
    assert found.divergence.positions > 60
    assert found.divergence.mean_nats == pytest.approx(0.0, abs=1e-5)
    assert found.divergence.top1_agreement == 1.0
    assert [entry.temperature for entry in found.acceptance] == [0.0, 0.3, 0.7, 1.0]
    for entry in found.acceptance:
        assert entry.rate > 0.99


@pytest.mark.slow
def test_another_tokenizer_is_drafted_universally(
    tiny_model_dir: Path, tiny_draft_dir: Path
) -> None:
    pair = load_pair(config(tiny_model_dir, tiny_draft_dir))
    assert pair.drafter.name == "universal"
    found, stages = examined(pair, compare_argmax=True)
    assert len(stages) == num_stages(SOURCES, compare_argmax=True)
    assert 0.1 < found.vocabulary_overlap < 1.0
    assert found.divergence is not None
    assert found.divergence.positions > 20
    assert 0.01 < found.divergence.mean_nats < 10
    assert 0.2 < found.acceptance[0].rate < 1.0
    assert [entry.temperature for entry in found.argmax_acceptance] == [0.7, 1.0]
    assert set(found.costs.target_ms) == set(found.costs.draft_ms) == set(range(1, 10))
    json.dumps(found.as_json())


@pytest.mark.slow
def test_coupled_drafts_are_accepted_more_often_than_the_likeliest(
    tiny_model_dir: Path, tiny_sibling_dir: Path
) -> None:
    pair = load_pair(config(tiny_model_dir, tiny_sibling_dir))
    assert pair.drafter.name == "model"
    found, _ = examined(pair, compare_argmax=True)
    coupled = {entry.temperature: entry.rate for entry in found.acceptance}
    for entry in found.argmax_acceptance:
        assert coupled[entry.temperature] > entry.rate


def test_no_draft_no_examination(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"^draft: name the draft model"):
        load_pair(config(tiny_model_dir, None))


def run_doctor(target: Path, draft: Path, prompts: Path, *options: str) -> int:
    command = ["doctor", "--model", str(target), "--draft", str(draft), "--prompts", str(prompts)]
    common = ["--runner", "torch", "--device", "cpu", "--max-tokens", "12"]
    return main([*command, *common, *options])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        json.dumps({"category": "chat", "turns": [sentences(2, 5)]})
        + "\n"
        + json.dumps({"category": "text", "prompt": sentences(3, 6)[:-5]})
    )
    return path


@pytest.mark.slow
def test_command_prints_tables_and_writes_json_and_plot(
    tiny_model_dir: Path,
    tiny_draft_dir: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures, plot = prompts.with_name("out.json"), prompts.with_name("out.png")
    code = run_doctor(
        tiny_model_dir, tiny_draft_dir, prompts, "--json", str(figures), "--plot", str(plot)
    )
    assert code == 0
    printed = capsys.readouterr().out
    for words in ("vocabulary overlap", "KL(target", "Acceptance", "tiny-draft", "•"):
        assert words in printed
    found = json.loads(figures.read_text())
    assert found["drafter"] == "universal"
    assert [entry["temperature"] for entry in found["acceptance"]] == [0.0, 0.3, 0.7, 1.0]
    assert found["acceptance"][0]["speed_up_by_length"]["0"] == 1.0
    assert found["advice"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_names_the_extra(
    tiny_model_dir: Path,
    tiny_draft_dir: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_doctor(tiny_model_dir, tiny_draft_dir, prompts, "--plot", "x.png") == 1
    assert capsys.readouterr().err == (
        "slipstream: error: --plot needs matplotlib: pip install 'slipstream[doctor]'\n"
    )


def test_unreadable_prompts_are_one_line(
    tiny_model_dir: Path, tiny_draft_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_doctor(tiny_model_dir, tiny_draft_dir, tmp_path / "none.jsonl") == 1
    assert "none.jsonl: No such file or directory" in capsys.readouterr().err
