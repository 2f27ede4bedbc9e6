"""The ledger of a sender: nothing is counted twice, nothing is lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarm.consensus.feedback import (
    Unsent,
    corrected,
    correction,
    only_ours,
    reverse_correction,
    unsent,
)
from swarm.consensus.fixed_point import SCALE_ONE, FixedUpdate, compact, scaled, to_float
from swarm.consensus.sums import apply_step

SIZE = 12
small = st.lists(st.integers(-(2**20), 2**20), min_size=SIZE, max_size=SIZE)


def _dense(values: list[int]) -> FixedUpdate:
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
    after = corrected(weights, correction(change, own, scale))
    assert np.array_equal(unsent(after, new), before - scaled(own, scale).values)
    back = corrected(after, reverse_correction(change, own, scale))
    assert np.array_equal(unsent(back, consensus), before)


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
