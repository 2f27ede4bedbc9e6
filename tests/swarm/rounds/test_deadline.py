"""The first deadline follows the past within its limits, and late ones are part of the past."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.rounds.deadline import DeadlineRules, agreed_s, proposal_s, remembered

RULES = DeadlineRules(1.0, 10.0)


@given(st.lists(st.floats(0, 1000)))
def test_always_between_floor_and_ceiling(times: list[float]) -> None:
    assert 1.0 <= proposal_s(times, RULES) <= 10.0
    assert 1.0 <= agreed_s(times, RULES) <= 10.0


def test_follows_arrivals() -> None:
    assert proposal_s([], RULES) == 10.0
    assert proposal_s([0.1] * 8, RULES) == 1.0
    assert 2.0 < proposal_s([2.0, 2.1, 1.9, 2.2], RULES) < 4.0


def test_does_not_shrink_below_what_most_need() -> None:
    """Most arrive at 4 s, which is late at first: the deadline grows until they are in time."""
    history: tuple[float, ...] = (0.5,) * 8
    for _ in range(20):
        history = remembered(history, [4.0, 4.1, 0.5], RULES)
    assert proposal_s(history, RULES) > 4.1
    assert len(history) <= RULES.history


def test_one_lying_proposal_moves_nothing() -> None:
    assert agreed_s([2.0, 2.0, 2.0, 1e9], RULES) == 2.0
    assert agreed_s([2.0, 2.0, 2.0, -5.0], RULES) == 2.0
