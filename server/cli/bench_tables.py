"""The tables of `slipstream bench`: 80 columns hold each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from engine.bench import ContextFigures, DecodeFigures, PassFigures
    from engine.kernels.bench import KernelReport


def pass_table(figures: PassFigures) -> Table:
    """One model's steps, a line for each number of rows."""
    table = _table(
        f"{figures.model}: passes (medians), prefill {figures.prefill_tokens_per_s:.0f} tokens/s",
        "rows", "ms", "x 1 row", "tok/s", "memory GB/s",
    )  # fmt: skip
    for rows, ms in figures.step_ms.items():
        table.add_row(
            str(rows),
            f"{ms:.1f}",
            f"{figures.step_ratios[rows]:.2f}",
            f"{rows / ms * 1e3:.1f}",
            _bandwidth(figures.read_gigabytes_per_s[rows]),
        )
    return table


def context_table(figures: Sequence[ContextFigures]) -> Table:
    """Prefill and decoding of one request, a line for each model and length."""
    table = _table(
        "One request at length", "model", "context", "prefill tok/s", "decode ms", "memory GB/s"
    )
    for entry in figures:
        table.add_row(
            entry.model,
            str(entry.context),
            f"{entry.prefill_tokens_per_s:.0f}",
            f"{entry.decode_ms:.1f}",
            _bandwidth(entry.read_gigabytes_per_s),
        )
    return table


def decode_table(figures: Sequence[DecodeFigures], concurrency: int) -> Table:
    """What drafters did, a line for each category and choice of them."""
    table = Table(title=f"Decoding, {concurrency} in flight", title_justify="left")
    for heading in ("category", "drafters", "tokens", "tokens/pass", "tok/s", "x plain"):
        table.add_column(heading, justify="left" if heading < "t" else "right")
    plain = {entry.category: entry for entry in figures if entry.drafters == "plain"}
    for entry in sorted(figures, key=lambda e: e.category == "all"):
        table.add_row(
            entry.category,
            entry.drafters,
            str(entry.tokens),
            f"{entry.tokens_per_pass:.2f}",
            f"{entry.tokens_per_s:.1f}",
            f"{entry.tokens_per_s / plain[entry.category].tokens_per_s:.2f}",
            end_section=entry.drafters == figures[-1].drafters,
        )
    return table


def kernel_table(report: KernelReport) -> Table:
    """A line for each layer shape and number of rows, beside the read bandwidth."""
    table = _table(
        f"Linear layers: variant {report.variant}, {report.threads} threads, memory reads "
        f"{report.read_gigabytes_per_second:.1f} GB/s",
        "layer", "rows", "ms", "GB/s", "GOP/s",
    )  # fmt: skip
    for shape in report.shapes:
        name = f"{shape.format} {shape.outputs} x {shape.inputs} ({shape.matrices})"
        for time in shape.times:
            is_last = time is shape.times[-1]
            table.add_row(
                name if time is shape.times[0] else "",
                str(time.rows),
                f"{time.milliseconds:.2f}",
                f"{time.gigabytes_per_second:.1f}",
                f"{time.gigaops_per_second:.0f}",
                end_section=is_last,
            )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _bandwidth(gigabytes_per_s: float | None) -> str:
    return "" if gigabytes_per_s is None else f"{gigabytes_per_s:.1f}"
