"""Skewed clocks land on the median one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.rounds.clock import MAX_OFFSET_S, ClockSample, RunClock, exchange_opens_s, round_at


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=9))
def test_all_replicas_agree_on_the_time(skews: list[float]) -> None:
    times = []
    for i, own in enumerate(skews):
        clock = RunClock()
        for j, other in enumerate(skews):
            if j != i:
                sample = ClockSample(100 + own, 100.05 + other, 100.1 + own)
                clock = clock.with_sample(f"p{j}", sample)
        times.append(clock.run_time_s(100 + own))
    assert max(times) - min(times) < 1e-6


def test_the_quickest_answer_counts_and_impossible_ones_do_not() -> None:
    clock = RunClock()
    for peer in ("a", "b"):
        clock = clock.with_sample(peer, ClockSample(0.0, 5.0, 4.0))  # slow: 3 s off
        clock = clock.with_sample(peer, ClockSample(10.0, 11.05, 10.1))
        clock = clock.with_sample(peer, ClockSample(20.0, 99.0, 19.0))  # answered before asked
        clock = clock.with_sample(peer, ClockSample(20.0, float("nan"), 20.1))
        clock = clock.with_sample(peer, ClockSample(20.0, 1e12, 20.1))
    assert abs(clock.correction_s - 1.0) < 1e-9
    assert clock.without("a").without("b").correction_s == 0.0


def test_a_majority_that_is_far_off_moves_nobody_far() -> None:
    clock = RunClock()
    for number in range(16):
        clock = clock.with_sample(f"far{number}", ClockSample(0.0, 3590.0, 0.02))
    assert clock.correction_s == 0.0
    for number in range(16):
        clock = clock.with_sample(f"near{number}", ClockSample(0.0, 100.0, 0.02))
    assert 0 < clock.correction_s <= MAX_OFFSET_S


def test_samples_move_with_a_local_clock_that_is_set() -> None:
    clock = RunClock()
    for peer in ("a", "b"):
        clock = clock.with_sample(peer, ClockSample(90.0, 0.05, 90.1))
    before = clock.run_time_s(100.0)
    assert abs(clock.shifted(-90.0).run_time_s(10.0) - before) < 1e-9
    assert clock.shifted(1000.0).correction_s == 0.0  # nobody is that far off


def test_rounds_follow_the_clock() -> None:
    assert [round_at(t, 100, 10) for t in (100, 109.9, 110, 135)] == [0, 0, 1, 3]
    assert exchange_opens_s(3, 100, 10) == 130
