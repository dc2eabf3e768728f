"""The goodput policy's decisions, where its surroundings change but its drafts don't."""

from __future__ import annotations

from engine.draft.decision import DraftOption, RequestOptions
from tests.speculation.simulated_server import SimulatedServer


def compute_bound(rows: int) -> float:
    return 0.05 + 0.006 * rows


def drafted(server: SimulatedServer, *, prompt_rows: int) -> int:
    requests = [RequestOptions(name, (DraftOption("model", 24),), 1000) for name in server.requests]
    return sum(decision.expected_length for decision in server.policy.choose(requests, prompt_rows))


def test_prompt_rows_in_a_step_make_time_no_cheaper() -> None:
    """A long step has few tokens a second, but a draft in it delays everyone as anywhere else."""
    server = SimulatedServer(compute_bound, lambda rows: 0.012, num_running=8)
    for rows in (64, 128, 256):
        server.policy.observe_step(rows, compute_bound(rows))
    server.run(60, acceptance=0.75)
    assert drafted(server, prompt_rows=120) <= drafted(server, prompt_rows=0) + 1


def test_one_request_drafts_beside_prompt_rows_as_it_does_without() -> None:
    server = SimulatedServer(lambda rows: 0.05 + 0.002 * rows, lambda rows: 0.004)
    for rows in (64, 128, 256):
        server.policy.observe_step(rows, 0.05 + 0.002 * rows)
    server.run(60, acceptance=0.9)
    assert drafted(server, prompt_rows=0) >= 4
    assert drafted(server, prompt_rows=120) >= 4


def wants_prepared(server: SimulatedServer, *, num_running: int) -> bool:
    prompt = RequestOptions("new", (DraftOption("model", 24, num_uncomputed_tokens=150),), 64)
    (wanted,) = server.policy.wants_prepared([prompt], num_running)
    return wanted


def test_a_draft_model_follows_no_prompts_where_drafts_would_not_pay() -> None:
    """Rows cost time here: eight requests that all drafted would be slower, one is faster."""
    server = SimulatedServer(lambda rows: 0.03 + 0.006 * rows, lambda rows: 0.006 + 0.0004 * rows)
    for rows in (16, 24, 32, 64, 128):
        server.policy.observe_step(rows, 0.03 + 0.006 * rows)
    assert wants_prepared(server, num_running=1)
    assert not wants_prepared(server, num_running=8)
