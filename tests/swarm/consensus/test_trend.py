"""The trend that goes on is the trend that is added up."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.consensus.fixed_point import FixedUpdate, exact_dot
from swarm.consensus.sums import apply_step, summed
from swarm.consensus.trend import Trend
from tests.support.fixed_updates import SIZE, vectors

small = vectors(2**27)


def _check(trend: Trend, steps: list[FixedUpdate], update: FixedUpdate) -> None:
    nothing = FixedUpdate(SIZE, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    total = summed([(step, 1) for step in [nothing, *steps]]).dense()
    assert trend.squared == exact_dot(total, total)
    for form in (update, FixedUpdate(SIZE, None, update.dense())):
        assert trend.product(form) == exact_dot(total, update.dense())
        assert trend.products([form, update]) == [exact_dot(total, update.dense())] * 2


def test_a_trend_that_no_int32_holds() -> None:
    weights, steps = np.full(SIZE, -(2**31 - 1), dtype=np.int32), list[FixedUpdate]()
    for _ in range(3):
        weights, made = apply_step(weights, FixedUpdate(SIZE, np.arange(2), np.array([2**30, 1])))
        steps.append(made)
    trend, update = Trend(), FixedUpdate(SIZE, np.array([0, 3]), np.array([5, 7]))
    trend.follow(steps)
    _check(trend, steps, update)


@given(
    st.lists(st.tuples(small, st.booleans(), st.integers(0, 6)), min_size=1, max_size=12),
    small,
)
@settings(max_examples=150)
def test_it_is_the_sum_of_the_last_steps(
    story: list[tuple[FixedUpdate, bool, int]], update: FixedUpdate
) -> None:
    """Steps of both forms; some are forgotten, one by one or many at once."""
    weights = np.arange(-20, 20, dtype=np.int32) * 1_000_000
    trend, steps = Trend(), list[FixedUpdate]()
    for step, dense, forgotten in story:
        weights, made = apply_step(weights, step)
        steps.append(FixedUpdate(SIZE, None, made.dense()) if dense else made)
        steps = steps[min(forgotten, len(steps) - 1) :]
        trend.follow(steps)
        _check(trend, steps, update)
        trend.follow(steps)  # a second time changes nothing
        _check(trend, steps, update)


@given(st.lists(small, min_size=2, max_size=6), small)
def test_another_branch_begins_anew(steps: list[FixedUpdate], update: FixedUpdate) -> None:
    trend, weights = Trend(), np.zeros(SIZE, dtype=np.int32)
    made = []
    for step in steps:
        weights, change = apply_step(weights, step)
        made.append(change)
    trend.follow(made)
    _, other = apply_step(np.ones(SIZE, dtype=np.int32), steps[0])
    trend.follow([other])
    _check(trend, [other], update)
    trend.follow([])
    _check(trend, [], update)
