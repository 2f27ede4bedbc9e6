"""The budget of bytes per day: a sliding day, bounded memory."""

from __future__ import annotations

from node.budget import DAY_S, DailyBudget


def test_no_limit_is_never_over() -> None:
    budget = DailyBudget(None)
    assert not any(budget.over(float(i), i * 10**9) for i in range(100))


def test_what_came_before_the_first_question_does_not_count() -> None:
    budget = DailyBudget(100)
    assert not budget.over(0.0, 10**12)
    assert not budget.over(60.0, 10**12 + 100)
    assert budget.over(120.0, 10**12 + 101)


def test_a_day_later_there_is_room_again() -> None:
    budget = DailyBudget(1000)
    total, over = 0, []
    for hour in range(60):
        if not budget.over(hour * 3600.0, total):
            total += 100  # an hour of exchange
        else:
            over.append(hour)
    assert over and over[0] == 11
    assert total <= 1100 * 3  # three days at most, each a little over
    assert len(budget._totals) <= DAY_S / 900 + 2
    assert any(hour not in over for hour in range(24, 48))
