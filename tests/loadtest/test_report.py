from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from loadtest.acceptance import Acceptance, DrafterFigures
from loadtest.client import Record
from loadtest.output import show, to_json
from loadtest.report import Distribution, is_good, parse_limits, summarize


def record(
    started: float = 0.0,
    *,
    ttft: float = 0.5,
    gap: float = 0.1,
    chunks: int = 5,
    tokens: int = 9,
    category: str = "code",
    error: str | None = None,
) -> Record:
    times = tuple(started + ttft + gap * n for n in range(chunks))
    return Record(
        category=category,
        started=started,
        ended=times[-1],
        chunk_times=times,
        prompt_tokens=10,
        completion_tokens=tokens,
        error=error,
    )


class TestDistribution:
    def test_interpolates_between_the_nearest_values(self) -> None:
        found = Distribution.of([4.0, 1.0, 3.0, 2.0, 5.0])
        assert found is not None
        assert (found.mean, found.p50) == (3.0, 3.0)
        assert found.p90 == pytest.approx(4.6)
        assert found.p99 == pytest.approx(4.96)

    def test_of_one_value_is_that_value(self) -> None:
        assert Distribution.of([2.0]) == Distribution(2.0, 2.0, 2.0, 2.0)

    def test_of_nothing_is_nothing(self) -> None:
        assert Distribution.of([]) is None


class TestSummary:
    def test_counts_complete_answers_only(self) -> None:
        records = [
            record(0.0),
            record(1.0),
            record(2.1, ttft=1.5, error="timeout"),
            record(0.5, error="HTTP 429: queue_full"),
            record(0.6, error="timeout"),
        ]
        report = summarize(records, {})
        assert report.seconds == pytest.approx(4.0)
        assert (report.requests, report.completed) == (5, 2)
        assert report.errors == {"timeout": 2, "HTTP 429: queue_full": 1}
        assert (report.prompt_tokens, report.completion_tokens) == (20, 18)
        assert report.requests_per_second == pytest.approx(2 / 4)
        assert report.output_tokens_per_second == pytest.approx(18 / 4)
        assert report.total_tokens_per_second == pytest.approx(38 / 4)
        assert report.goodput is None

    def test_tells_latencies_apart(self) -> None:
        latencies = summarize([record()], {}).latencies
        assert latencies.ttft is not None
        assert latencies.ttft.p50 == pytest.approx(0.5)
        assert latencies.tpot is not None
        assert latencies.tpot.p50 == pytest.approx(0.4 / 8)
        assert latencies.gap is not None
        assert latencies.gap.p99 == pytest.approx(0.1)
        assert latencies.e2e is not None
        assert latencies.e2e.mean == pytest.approx(0.9)

    def test_groups_by_category(self) -> None:
        records = [record(category="chat"), record(category="code"), record(category="chat")]
        shares = summarize(records, {}).categories
        assert {name: share.requests for name, share in shares.items()} == {"chat": 2, "code": 1}
        assert shares["chat"].completion_tokens == 18

    def test_survives_a_run_where_everything_failed(self) -> None:
        report = summarize([record(error="timeout")], {"ttft": 1.0})
        assert report.latencies.ttft is None
        assert report.goodput is not None
        assert report.goodput.share == 0.0


class TestGoodput:
    def test_is_what_meets_every_limit(self) -> None:
        limits = parse_limits(["ttft:0.6", "tpot:0.06"])
        records = [
            record(0.0),
            record(0.0, ttft=0.7),
            record(0.0, gap=0.2),
            record(1.6, gap=0.1),
            record(0.0, error="timeout"),
        ]
        goodput = summarize(records, limits).goodput
        assert goodput is not None
        assert goodput.good_requests == 2
        assert goodput.share == pytest.approx(2 / 5)
        assert goodput.requests_per_second == pytest.approx(2 / 2.5)

    @pytest.mark.parametrize(("limit", "good"), [(0.9, True), (0.89, False)])
    def test_includes_the_limit_itself(self, limit: float, good: bool) -> None:
        assert is_good(Record("x", 0.0, 0.9, (0.5, 0.9), 1, 2), {"e2e": limit}) is good

    def test_an_answer_of_one_token_has_no_time_per_token_to_miss(self) -> None:
        assert is_good(record(tokens=1), {"tpot": 1e-9})

    @pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:fast", "itl:0.1", ""])
    def test_limits_must_be_known_and_numbers(self, text: str) -> None:
        with pytest.raises(ValueError, match=repr(text)):
            parse_limits([text])


ACCEPTANCE = Acceptance(
    generated_tokens=90,
    target_passes=40,
    drafters={"ngram": DrafterFigures(20, 80, 50, (18, 16, 10, 6))},
)


class TestOutput:
    def show(self, report_of: list[Record], acceptance: Acceptance | None) -> str:
        text = io.StringIO()
        limits = parse_limits(["ttft:0.6"])
        show(summarize(report_of, limits, acceptance), Console(file=text, width=120))
        return text.getvalue()

    def test_the_tables_show_the_figures(self) -> None:
        text = self.show([record(), record(category="chat"), record(error="timeout")], ACCEPTANCE)
        for expected in ("2 of 3", "500.0", "50.0", "failed: timeout", "ttft <= 0.6 s", "67%"):
            assert expected in text
        for expected in ("2.25 tokens a target pass", "62.5%", "2.50", "90% 80% 50% 30%", "chat"):
            assert expected in text

    def test_the_tables_say_what_is_missing(self) -> None:
        text = self.show([record(error="timeout")], None)
        assert "no acceptance figures" in text

    def test_json_has_everything(self) -> None:
        values = json.loads(json.dumps(to_json(summarize([record()], {}, ACCEPTANCE))))
        assert values["latencies"]["ttft"]["p50"] == 0.5
        assert values["acceptance"]["tokens_per_pass"] == 2.25
        assert values["acceptance"]["drafters"]["ngram"] == {
            "drafts": 20,
            "draft_tokens": 80,
            "accepted_tokens": 50,
            "accepted_by_position": [18, 16, 10, 6],
            "acceptance_rate": 0.625,
            "mean_accepted": 2.5,
        }
