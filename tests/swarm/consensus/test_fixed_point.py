"""Updates and consensus in integers: exact, reversible, the same name in any form."""

from __future__ import annotations

from math import isqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.digests import weights_digest
from protocol.updates import UpdateError
from swarm.consensus.fixed_point import (
    SCALE_ONE,
    VALUE_LIMIT,
    FixedUpdate,
    checked,
    exact_dot,
    norm,
    rounded_mean,
    scaled,
    to_fixed,
    to_float,
)
from swarm.consensus.sums import CUT, apply_step, sparse_against, summed
from tests.support.fixed_updates import SIZE, ints, vectors

PINNED_WEIGHTS = "955afa82485a988d"
PINNED_STEP = "23a3140294c0dc61"
PINNED_SPARSE_STEP = "80f016e8eac617fe"


@given(vectors(), vectors())
def test_inner_product_is_exact(a: FixedUpdate, b: FixedUpdate) -> None:
    expected = sum(int(x) * int(y) for x, y in zip(a.dense(), b.dense(), strict=True))
    assert exact_dot(a.dense(), b.dense()) == expected
    assert norm(a) == isqrt(sum(int(x) ** 2 for x in a.values))


@pytest.mark.parametrize("size", [1, CUT - 1, CUT, CUT + 1, 2 * CUT + 77])
@pytest.mark.parametrize("dense", [0, 1])
def test_a_sum_in_pieces_is_the_sum(size: int, dense: int) -> None:
    rng = np.random.default_rng(size)
    parts = []
    for number, share in enumerate((0.0, 0.01, 0.2, 1.0)):
        values = rng.integers(-VALUE_LIMIT + 1, VALUE_LIMIT, size) * (rng.random(size) < share)
        at = np.flatnonzero(values)
        sparse = FixedUpdate(size, at, values[at])
        parts.append(
            (FixedUpdate(size, None, values) if dense and number == 2 else sparse, 1 - number)
        )
    total = summed(parts)
    expected = sum(times * part.dense() for part, times in parts)
    assert np.array_equal(total.dense(), expected)
    assert (total.indices is None) == (2 * np.count_nonzero(expected) >= size)
    few = summed(parts[:2])
    assert few.indices is not None or size == 1
    assert np.array_equal(few.dense(), parts[0][0].dense())  # the second counts 0 times


@pytest.mark.parametrize("size", [1, CUT - 1, CUT + 1, 2 * CUT + 77])
@pytest.mark.parametrize("most", [1, 1 << 20, VALUE_LIMIT - 1])
def test_products_with_a_sum_and_with_the_trend_are_exact(size: int, most: int) -> None:
    rng = np.random.default_rng((size, most))
    updates = []
    for share in (0.0, 0.001, 0.02, 0.2):
        values = rng.integers(-most, most + 1, size) * (rng.random(size) < share)
        values[CUT:] *= share > 0.01  # nothing in a piece of its own
        at = np.flatnonzero(values).astype(np.int32)
        updates.append(FixedUpdate(size, at, values[at].astype(np.int32)))
    beside = rng.integers(-most, most + 1, size).astype(np.int32)
    parts = [(updates[1], 1), (updates[3], 2), (scaled(updates[2], SCALE_ONE // 2), -1)]
    total, products, along = sparse_against(parts, updates, beside)
    expected = sum(times * part.dense() for part, times in parts)
    assert np.array_equal(total.dense(), expected)
    assert products == [exact_dot(update.dense(), expected) for update in updates]
    assert along == [exact_dot(update.dense(), beside.astype(np.int64)) for update in updates]


@given(vectors(), st.integers(0, SCALE_ONE))
def test_scaling_never_lengthens(update: FixedUpdate, scale: int) -> None:
    short = scaled(update, scale)
    assert np.all(np.abs(short.values) * SCALE_ONE <= np.abs(update.values) * scale)


@given(st.integers(-(2**61), 2**61) | st.integers(-(2**40), 2**40), st.integers(1, 16))
def test_mean_is_symmetric_and_nearest(total: int, count: int) -> None:
    one = int(rounded_mean(np.array([total]), count)[0])
    assert one == -int(rounded_mean(np.array([-total]), count)[0])
    assert abs(2 * (one * count - total)) <= count


@given(st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=SIZE, max_size=SIZE), vectors())
def test_steps_are_reversible_even_at_the_edge(start: list[int], delta: FixedUpdate) -> None:
    consensus = np.array(start, dtype=np.int32)
    new, change = apply_step(consensus, delta)
    back, _ = apply_step(new, FixedUpdate(SIZE, change.indices, -change.values))
    assert np.array_equal(back, consensus)


def test_fixed_point_holds_weights() -> None:
    weights = np.array([0.0, 1.5, -0.02, 127.9, 1e-7], dtype=np.float32)
    assert np.allclose(to_float(to_fixed(weights)), weights, atol=2**-24)
    assert np.all(np.abs(to_fixed(np.array([1e9, -1e9], dtype=np.float32))) == VALUE_LIMIT - 1)


def test_digests_are_pinned() -> None:
    """A change of these names is a change of the protocol."""
    assert weights_digest(np.arange(4, dtype=np.int32)).hex()[:16] == PINNED_WEIGHTS
    for size, name in ((4, PINNED_STEP), (8, PINNED_SPARSE_STEP)):
        sparse = FixedUpdate(size, np.array([1, 3]), np.array([5, -7]))
        assert sparse.digest.hex()[:16] == name


@given(vectors(), st.lists(st.integers(0, SIZE - 1), max_size=4))
def test_a_step_has_one_name_in_any_form(step: FixedUpdate, zeros: list[int]) -> None:
    padded = step.dense().copy()
    indices = np.union1d(np.flatnonzero(padded), zeros).astype(np.int64)
    others = [FixedUpdate(SIZE, None, padded), FixedUpdate(SIZE, indices, padded[indices])]
    assert {other.digest for other in others} == {step.digest}


@pytest.mark.parametrize(
    "bad",
    [
        FixedUpdate(9, None, ints(1, 2)),
        FixedUpdate(4, None, ints(1, 2)),
        FixedUpdate(4, ints(0, 0), ints(1, 2)),
        FixedUpdate(4, ints(1, 0), ints(1, 2)),
        FixedUpdate(4, ints(-1, 0), ints(1, 2)),
        FixedUpdate(4, ints(0, 4), ints(1, 2)),
        FixedUpdate(4, ints(0), ints(1, 2)),
        FixedUpdate(4, ints(0), ints(VALUE_LIMIT)),
        FixedUpdate(4, ints(0), np.array([np.nan])),
        FixedUpdate(4, None, np.zeros((2, 2), dtype=np.int64)),
    ],
)
def test_malformed_updates_are_refused(bad: FixedUpdate) -> None:
    with pytest.raises(UpdateError):
        checked(bad, 4)
