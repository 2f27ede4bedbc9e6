"""Updates as hypothesis likes them, for the tests of the integer arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from swarm.consensus.fixed_point import QUANTUM_BITS, VALUE_LIMIT, FixedUpdate, Ints

SIZE = 40


@st.composite
def vectors(draw: st.DrawFn, limit: int = VALUE_LIMIT - 1) -> FixedUpdate:
    places = sorted(draw(st.sets(st.integers(0, SIZE - 1), max_size=12)))
    values = [draw(st.integers(-limit, limit)) for _ in places]
    return FixedUpdate(SIZE, np.array(places, dtype=np.int64), np.array(values, dtype=np.int64))


def same(one: FixedUpdate, other: FixedUpdate) -> bool:
    """Whether they are the same vector, in whichever form."""
    return one.size == other.size and bool(np.array_equal(one.dense(), other.dense()))


def corrected(weights: npt.NDArray[np.float32], change: FixedUpdate) -> npt.NDArray[np.float32]:
    """weights + change, rounded once."""
    quanta = change.dense() * 2.0**-QUANTUM_BITS
    return (weights.astype(np.float64) + quanta).astype(np.float32)


def unsent(
    weights: npt.NDArray[np.float32],
    consensus: npt.NDArray[np.int32],
    in_flight: Sequence[FixedUpdate] = (),
    aside: Ints | None = None,
) -> Ints:
    """What the weights have and the consensus has not, in quanta, without rounding to fp32."""
    total = np.rint(weights.astype(np.float64) * 2.0**QUANTUM_BITS).astype(np.int64) - consensus
    if aside is not None:
        total += aside
    for update in in_flight:
        total -= update.dense()
    return total


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)
