"""Updates as hypothesis likes them, for the tests of the integer arithmetic."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from swarm.consensus.fixed_point import VALUE_LIMIT, FixedUpdate, Ints

SIZE = 40


@st.composite
def vectors(draw: st.DrawFn, limit: int = VALUE_LIMIT - 1) -> FixedUpdate:
    places = sorted(draw(st.sets(st.integers(0, SIZE - 1), max_size=12)))
    values = [draw(st.integers(-limit, limit)) for _ in places]
    return FixedUpdate(SIZE, np.array(places, dtype=np.int64), np.array(values, dtype=np.int64))


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)
