"""The budget of bytes per day: a sliding day, bounded memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.host.budget import DAY_S, FILE, DailyBudget


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


def test_a_restart_does_not_begin_a_new_day(tmp_path: Path) -> None:
    budget = DailyBudget(1000)
    assert not budget.over(0.0, 5000)
    assert not budget.over(3600.0, 5900)
    kept = budget.to_bytes()
    assert kept is not None
    (tmp_path / FILE).write_bytes(kept)
    again = DailyBudget(1000)
    again.load(tmp_path)
    assert again.left_bytes(7200.0, 5950) == 50
    assert again.over(7300.0, 6001)
    assert not again.over(3600.0 + DAY_S, 6001)  # the first hour's 900 are a day old


def test_a_lost_ledger_or_a_clock_set_back_does_not_give_the_day_back(tmp_path: Path) -> None:
    for now_s, total in ((20000.0, 100), (3000.0, 5900)):
        budget = DailyBudget(1000)
        budget.over(10000.0, 5000)
        budget.over(14000.0, 5900)
        left = budget.left_bytes(now_s, total)
        assert left is not None and left <= 1000 - 900


@pytest.mark.parametrize(
    "text", ["", "{", "[[1]]", "[[2, 5], [1, 4]]", '[["a", 1]]', "[[1e999, 1]]", "[[-5, 1]]", "7"]
)
def test_a_file_that_is_none_is_no_past(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    budget = DailyBudget(1000)
    budget.load(tmp_path)
    assert budget.left_bytes(5.0, 10**9) == 1000


def test_without_a_limit_nothing_is_kept(tmp_path: Path) -> None:
    assert DailyBudget(None).to_bytes() is None
    (tmp_path / FILE).write_text(json.dumps([[i, i] for i in range(5000)]))
    budget = DailyBudget(1)
    budget.load(tmp_path)
    assert len(budget._totals) < 200
