from __future__ import annotations

from engine.serving.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_steady_departures() -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(5):
        pace.enter()
    for _ in range(4):
        clock.now += 2.0
        pace.leave()
    assert pace.num_present == 1
    assert pace.seconds_for(1) == 2.0
    assert pace.seconds_for(10) == 20.0


def test_before_the_first_departure_it_takes_as_long_as_it_has_taken() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.seconds_for(3) == 0.0
    pace.enter()
    clock.now += 7.0
    assert pace.seconds_for(3) == 21.0


def test_idle_time_does_not_count() -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(3):
        pace.enter()
        clock.now += 0.5
        pace.leave()
        clock.now += 3600.0
    assert pace.seconds_for(1) == 0.5
    pace.enter()
    clock.now += 0.5
    assert pace.seconds_for(3) == 2.0, "nobody has left in the spell that runs"


def test_silence_slows_the_pace_and_new_speed_replaces_the_old() -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(100):
        pace.enter()
    for _ in range(40):
        clock.now += 1.0
        pace.leave()
    clock.now += 32.0
    assert pace.seconds_for(1) == 2.0
    for _ in range(40):
        clock.now += 0.25
        pace.leave()
    assert pace.seconds_for(1) == 0.25
