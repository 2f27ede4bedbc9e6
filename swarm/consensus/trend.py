"""The trend: the exact sum of the last steps of a consensus, updated incrementally.

Adding up all eight steps in every round took half of the time of an aggregation; keeping the sum
costs one more int32 per weight. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarm.consensus.fixed_point import (
    VALUE_LIMIT,
    FixedUpdate,
    Ints,
    Quanta,
    Whole,
    add_into,
    exact_dot,
)
from swarm.consensus.sums import CUT, Cut

CHEAPER = 4  # if more steps than this are to be removed, adding up anew is cheaper
_ALL = slice(None)


class Trend:
    """The sum of the steps given to `follow`; of none before."""

    def __init__(self) -> None:
        self.squared = 0
        self._steps: tuple[FixedUpdate, ...] = ()
        self._sum: Quanta | Ints = np.zeros(0, dtype=np.int32)  # int64 if it could be too large

    def follow(self, steps: Sequence[FixedUpdate]) -> None:
        """Make this the sum of these steps."""
        steps = tuple(steps)
        gone = len(self._steps) - len(steps) + 1
        goes_on = 0 <= gone < len(self._steps) and gone <= CHEAPER
        wide = self._sum.dtype == np.int64
        fits = sum(s.largest for s in steps + self._steps[: max(gone, 0)]) < VALUE_LIMIT
        if goes_on and (fits or wide) and _same(self._steps[gone:], steps[:-1]):
            self._add(steps[-1], 1)
            for step in self._steps[:gone]:
                self._add(step, -1)
        elif not _same(self._steps, steps):
            self._begin(steps, fits)
        self._steps = steps

    def _begin(self, steps: Sequence[FixedUpdate], fits: bool) -> None:
        total = np.zeros(steps[0].size if steps else 0, dtype=np.int64)
        for step in steps:
            add_into(total, step)
        self.squared = exact_dot(total, total)
        self._sum = total.astype(np.int32) if fits else total

    def _add(self, step: FixedUpdate, sign: int) -> None:
        """|t + s|^2 = |t|^2 + 2 ts + |s|^2."""
        cut, product = None if step.indices is None else Cut(step), 0
        at: Ints | slice
        for start in range(0, len(self._sum), CUT):
            at, span = (_ALL, slice(start, start + CUT)) if cut is None else cut.piece(start)
            here, values = self._sum[start : start + CUT], step.values[span]
            met = here[at].astype(np.int64)
            product += exact_dot(values, met)
            if sign > 0:
                met += values
            else:
                met -= values
            here[at] = met
        self.squared += 2 * sign * product + step.squared

    @property
    def vector(self) -> Whole | None:
        """Sum of the tracked steps, or None if there are none."""
        return self._sum if self._steps else None

    def products(self, updates: Sequence[FixedUpdate]) -> list[int]:
        """The inner products of the trend with some updates."""
        return [self.product(update) for update in updates]

    def product(self, update: FixedUpdate) -> int:
        """The inner product of the trend with an update."""
        if not self._steps:
            return 0
        values = update.values
        if update.indices is not None:
            return exact_dot(values, self._sum[update.indices])
        return exact_dot(values, self._sum)


def _same(ours: Sequence[FixedUpdate], theirs: Sequence[FixedUpdate]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
