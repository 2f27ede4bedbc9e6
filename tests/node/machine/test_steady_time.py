"""A clock that goes on when the wall clock is set."""

from __future__ import annotations

import time

from node.machine.steady_time import SteadyTime


def test_a_step_of_the_wall_clock_is_seen_and_not_followed_by_itself() -> None:
    wall, steady = [1_000_000.0], [50.0]
    clock = SteadyTime(lambda: wall[0], lambda: steady[0])
    assert clock() == 1_000_000.0
    wall[0] += 10
    steady[0] += 10
    assert clock() == 1_000_010.0 and clock.stepped_s == 0
    wall[0] -= 100  # NTP
    assert clock() == 1_000_010.0 and clock.stepped_s == -100
    assert clock.follow() == -100
    assert clock() == wall[0] and clock.stepped_s == 0


def test_it_is_the_time_of_day() -> None:
    assert abs(SteadyTime()() - time.time()) < 1.0
