"""The ledger of a sender: nothing is counted twice, nothing is lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarm.consensus.feedback import (
    Unsent,
    aside_share,
    only_ours,
    set_aside,
)
from swarm.consensus.fixed_point import (
    SCALE_ONE,
    FixedUpdate,
    Halves,
    Ints,
    compact,
    scaled,
    to_float,
)
from swarm.consensus.sums import apply_step
from tests.support.fixed_updates import corrected, unsent

SIZE = 12
small = st.lists(st.integers(-(2**20), 2**20), min_size=SIZE, max_size=SIZE)


def _dense(values: list[int] | Ints) -> FixedUpdate:
    return FixedUpdate(SIZE, None, np.array(values, dtype=np.int64))


@given(small, small, small, small, st.integers(0, SCALE_ONE))
def test_unsent_changes_by_what_went_in(
    start: list[int], learned: list[int], sent: list[int], others: list[int], scale: int
) -> None:
    """Values are below 2**22 quanta, where fp32 is exact, so the ledger must be too."""
    consensus = np.array(start, dtype=np.int32)
    weights = corrected(to_float(consensus), _dense(learned))
    before = unsent(weights, consensus)
    assert before.tolist() == learned
    own, step = _dense(sent), _dense(others)
    new, change = apply_step(consensus, step)
    mine = scaled(own, scale).values
    after = corrected(weights, _dense(change.dense() - mine))
    assert np.array_equal(unsent(after, new), before - mine)


@given(small, small)
def test_in_flight_is_not_sent_again(learned: list[int], flying: list[int]) -> None:
    consensus = np.zeros(SIZE, dtype=np.int32)
    weights = corrected(to_float(consensus), _dense(learned))
    rest = unsent(weights, consensus, in_flight=[_dense(flying)])
    assert rest.tolist() == [a - b for a, b in zip(learned, flying, strict=True)]


@given(small, small)
def test_aside_form_obeys_the_same_identity(learned: list[int], kept: list[int]) -> None:
    consensus = np.zeros(SIZE, dtype=np.int32)
    weights = corrected(to_float(consensus), _dense(learned))
    total = unsent(weights, consensus, aside=np.array(kept, dtype=np.int64))
    assert total.tolist() == [a + b for a, b in zip(learned, kept, strict=True)]


@given(small, small)
def test_a_merge_neither_repeats_nor_undoes(ours: list[int], theirs: list[int]) -> None:
    extra = only_ours(np.array(ours), np.array(theirs)).tolist()
    for mine, their, more in zip(ours, theirs, extra, strict=True):
        if mine * their > 0:  # both went this way: the end is the farther of the two
            assert abs(their + more) == max(abs(mine), abs(their))
        else:
            assert more == mine


@given(small, small, small)
def test_as_weights_it_is_the_same(start: list[int], learned: list[int], flying: list[int]) -> None:
    """Values are below 2**23 quanta, where fp32 is exact."""
    consensus = np.array(start, dtype=np.int32)
    weights = corrected(to_float(consensus), _dense(learned))
    exact = unsent(weights, consensus, in_flight=[_dense(flying)])
    lazy = Unsent(weights, consensus, in_flight=[_dense(flying)])
    assert np.array_equal(lazy.dense() * 2.0**24, exact)
    assert np.array_equal(lazy.times(0.5).dense() * 2.0**25, exact)
    sparse = Unsent(weights, consensus, in_flight=[compact(_dense(flying).dense())])
    read = [sparse.read(at, np.empty(1, dtype=np.float32))[0] for at in range(sparse.size)]
    assert np.array_equal(np.array(read) * 2.0**24, exact)


def test_who_is_alone_carries_all_and_many_put_most_aside() -> None:
    assert aside_share(1.0) == aside_share(0.3) == 0.0
    assert aside_share(4.0) == 0.5
    shares = [aside_share(n / 2) for n in range(2, 40)]
    assert shares == sorted(shares) and shares[-1] < 1


@given(small, small, small, st.floats(0.0, 1.0))
def test_what_is_put_aside_is_neither_lost_nor_counted_twice(
    start: list[int], learned: list[int], sent: list[int], share: float
) -> None:
    """weights + aside = consensus + unsent, before and after, whatever is rounded on the way."""
    consensus = np.array(start, dtype=np.int32)
    weights = corrected(to_float(consensus), _dense(learned))
    aside: Halves | None = None
    before = Unsent(weights, consensus).dense()
    for _ in range(3):
        rest = Unsent(weights, consensus, aside=aside)
        aside, change = set_aside(rest, _dense(sent), share)
        if change is None:
            assert aside is None and share == 0
            continue
        weights = weights + change
        after = Unsent(weights, consensus, aside=aside).dense()
        assert np.allclose(after, before, rtol=0, atol=2.0**-22 * 128)
        if aside is not None:
            wanted = share * (before - np.array(sent) * 2.0**-24)
            assert np.allclose(aside, wanted, rtol=2e-3, atol=1e-6)
    # Given back, as before a save: all is in the weights again.
    if aside is not None:
        whole = Unsent(weights + aside.astype(np.float32), consensus).dense()
        assert np.allclose(whole, before, rtol=0, atol=2.0**-22 * 128)


def test_nothing_is_aside_any_more_once_the_others_are_gone() -> None:
    consensus, weights = np.zeros(4, dtype=np.int32), np.ones(4, dtype=np.float32)
    nothing = FixedUpdate(4, np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))
    aside, change = set_aside(Unsent(weights, consensus), nothing, 0.5)
    assert aside is not None and change is not None
    assert np.array_equal(aside, [0.5] * 4) and np.array_equal(weights + change, [0.5] * 4)
    rest = Unsent(weights + change, consensus, aside=aside)
    aside, change = set_aside(rest, nothing, 0.0)
    assert aside is None and change is not None
    assert np.array_equal(rest.weights + change, weights)
