"""The doctor's findings in words."""

from __future__ import annotations

from engine.doctor.report import Report

_SLOW_DRAFT = 0.35
_STEEP_ROWS = 2.5
_POOR_ACCEPTANCE = 0.5
_FAR_APART_NATS = 1.0
_LITTLE_OVERLAP = 0.3
_MUCH_LESS = 0.7
_WORTHWHILE = 1.05


def advise(report: Report) -> tuple[str, ...]:
    """One sentence or two for each thing worth knowing, the verdict first."""
    findings = (
        _verdict(report),
        _slow_draft(report),
        _steep_target(report),
        _far_apart(report),
        _too_hot(report),
        _template(report),
        _little_overlap(report),
    )
    return tuple(finding for finding in findings if finding is not None)


def _verdict(report: Report) -> str:
    greedy = report.acceptance[0]
    best = report.best_length(greedy)
    speed_up = report.speed_up(greedy, best)
    if best == 0 or speed_up < _WORTHWHILE:
        return (
            "This draft does not pay here: no draft length is expected to beat plain decoding by "
            f"{100 * (_WORTHWHILE - 1):.0f}%. Serve without it, or with ngram and predicted alone."
        )
    return (
        f"Drafting {best} tokens is expected to decode {speed_up:.2f} times as fast as plain "
        "decoding at temperature 0, one request at a time."
    )


def _slow_draft(report: Report) -> str | None:
    ratio = report.costs.ratio
    if ratio <= _SLOW_DRAFT:
        return None
    return (
        f"The draft is too slow: its pass costs {ratio:.2f} of a target pass. "
        "Take a smaller draft model or fewer bits a weight."
    )


def _steep_target(report: Report) -> str | None:
    rows = max(report.costs.target_ms)
    ratio = report.costs.target_ms[rows] / report.costs.target_ms[1]
    if ratio <= _STEEP_ROWS:
        return None
    return (
        f"The target's pass of {rows} rows costs {ratio:.1f} times one of 1 row, "
        "which makes long drafts dear whatever the draft model."
    )


def _far_apart(report: Report) -> str | None:
    rate = next(iter(report.acceptance[0].by_position), 0.0)
    divergence = report.divergence
    if rate >= _POOR_ACCEPTANCE:
        return None
    apart = ""
    if divergence is not None and divergence.mean_nats > _FAR_APART_NATS:
        apart = f", and KL(target || draft) is {divergence.mean_nats:.2f} nats"
    return (
        f"The distributions are too far apart: only {rate:.0%} of drafts begin with an accepted "
        f"token at temperature 0{apart}. Take a draft of the target's family, or one distilled "
        "from it."
    )


def _too_hot(report: Report) -> str | None:
    greedy, hottest = report.acceptance[0], report.acceptance[-1]
    if hottest.rate >= _MUCH_LESS * greedy.rate:
        return None
    best = report.best_length(hottest)
    return (
        f"Temperature {hottest.temperature:g} is too high for this pair: acceptance falls from "
        f"{greedy.rate:.0%} to {hottest.rate:.0%}, and the best draft length from "
        f"{report.best_length(greedy)} to {best}."
    )


def _template(report: Report) -> str | None:
    chat, raw = report.chat_acceptance, report.raw_text_acceptance
    if chat is None or raw is None or chat.rate >= _MUCH_LESS * raw.rate:
        return None
    return (
        f"Chats are accepted far less than the same text without a template ({chat.rate:.0%} "
        f"against {raw.rate:.0%}): look for a template mismatch, such as a base model as draft or "
        "one with another system prompt."
    )


def _little_overlap(report: Report) -> str | None:
    if report.drafter == "model" or report.vocabulary_overlap >= _LITTLE_OVERLAP:
        return None
    return (
        f"Only {report.vocabulary_overlap:.0%} of the draft's tokens are tokens of the target "
        "too, so sampled drafts can rarely be drawn with the target's noise."
    )
