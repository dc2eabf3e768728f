"""Shows a report: tables for people, JSON for machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.acceptance import Acceptance
from loadtest.report import Distribution, Goodput, Report, Share


def to_json(report: Report) -> dict[str, Any]:
    """Everything in the report, with the figures derived from the acceptance counters."""
    values = asdict(report)
    if (acceptance := report.acceptance) is not None:
        values["acceptance"]["tokens_per_pass"] = acceptance.tokens_per_pass
        for name, figures in acceptance.drafters.items():
            values["acceptance"]["drafters"][name] |= {
                "acceptance_rate": figures.acceptance_rate,
                "mean_accepted": figures.mean_accepted,
            }
    return values


def show(report: Report, console: Console) -> None:
    console.print(_throughput(report))
    console.print(_latencies(report))
    if len(report.categories) > 1:
        console.print(_categories(report.categories))
    if report.acceptance is None:
        console.print("The server has no Slipstream metrics: no acceptance figures.")
    else:
        console.print(_acceptance(report.acceptance))


def _throughput(report: Report) -> Table:
    table = Table(title="Throughput", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("time", f"{report.seconds:.2f} s")
    table.add_row("requests", f"{report.completed} of {report.requests}")
    table.add_row("requests a second", f"{report.requests_per_second:.2f}")
    table.add_row("output tokens", str(report.completion_tokens))
    table.add_row("output tokens a second", f"{report.output_tokens_per_second:.2f}")
    table.add_row("tokens a second, prompts included", f"{report.total_tokens_per_second:.2f}")
    if report.goodput is not None:
        table.add_row(*_goodput_row(report.goodput))
    for kind, count in report.errors.items():
        table.add_row(f"[red]failed: {kind}", f"[red]{count}")
    return table


def _goodput_row(goodput: Goodput) -> tuple[str, str]:
    limits = ", ".join(f"{name} <= {limit:g} s" for name, limit in goodput.limits.items())
    return (
        f"goodput ({limits})",
        f"{goodput.requests_per_second:.2f} requests a second, {goodput.share:.0%}",
    )


def _latencies(report: Report) -> Table:
    table = Table("", title="Latency in ms")
    for column in ("mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    latencies = report.latencies
    table.add_row("time to first token", *_milliseconds(latencies.ttft))
    table.add_row("time per output token", *_milliseconds(latencies.tpot))
    table.add_row("gap between chunks", *_milliseconds(latencies.gap))
    table.add_row("end to end", *_milliseconds(latencies.e2e))
    return table


def _milliseconds(distribution: Distribution | None) -> list[str]:
    if distribution is None:
        return ["-"] * 4
    return [
        f"{1000 * value:.1f}"
        for value in (distribution.mean, distribution.p50, distribution.p90, distribution.p99)
    ]


def _categories(categories: Mapping[str, Share]) -> Table:
    table = Table("category", title="By category")
    for column in ("requests", "output tokens", "p50 first token, ms", "mean output token, ms"):
        table.add_column(column, justify="right")
    for name, share in categories.items():
        table.add_row(
            name,
            str(share.requests),
            str(share.completion_tokens),
            _milliseconds(share.latencies.ttft)[1],
            _milliseconds(share.latencies.tpot)[0],
        )
    return table


def _acceptance(acceptance: Acceptance) -> Table:
    table = Table(
        "drafter", title=f"Speculation: {acceptance.tokens_per_pass:.2f} tokens a target pass"
    )
    for column in ("drafts", "draft tokens", "accepted", "rate", "a draft", "by position"):
        table.add_column(column, justify="right")
    for name, figures in acceptance.drafters.items():
        shares = (count / max(1, figures.drafts) for count in figures.accepted_by_position)
        table.add_row(
            name,
            str(figures.drafts),
            str(figures.draft_tokens),
            str(figures.accepted_tokens),
            f"{figures.acceptance_rate:.1%}",
            f"{figures.mean_accepted:.2f}",
            " ".join(f"{share:.0%}" for share in shares),
        )
    return table
