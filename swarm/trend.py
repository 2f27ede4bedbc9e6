"""The sum of the last steps of a consensus, kept so that the next one costs only what it changes.

    trend = weights now - weights before the oldest of these steps

Decides nothing: inner products with it are those with the sum, exactly. It spares a replica adding
up eight steps in every round, of which seven were there in the round before (half of the time of
an aggregation), for one more int32 per weight. Knows nothing of what the trend is for.

Not for two threads at once: whoever has it has it alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarm.fixed_point import (
    CUT,
    SEGMENT,
    VALUE_LIMIT,
    Cut,
    FixedUpdate,
    Ints,
    Quanta,
    add_into,
    exact_dot,
    magnitude,
)

CHEAPER = 4  # more steps than this to forget at once: adding up again is cheaper


class Trend:
    """The sum of some steps that ended in `weights`; of none before the first `follow`."""

    def __init__(self) -> None:
        self.squared = 0
        self._steps: tuple[FixedUpdate, ...] = ()
        self._weights: Quanta = np.zeros(0, dtype=np.int32)
        self._origin: Quanta = self._weights  # the weights before the first of the steps
        self._sizes: dict[int, int] = {}  # by the step's id: its largest value

    def follow(self, steps: Sequence[FixedUpdate], weights: Quanta) -> None:
        """Be the sum of these steps, the last of which led to `weights`."""
        steps = tuple(steps)
        gone = len(self._steps) - len(steps) + 1
        # A step in common, the last of ours: then the weights before the new one are ours, too.
        goes_on = 0 <= gone < len(self._steps) and gone <= CHEAPER
        if goes_on and _same(self._steps[gone:], steps[:-1]):
            self._weights = weights
            self._add(steps[-1])
            for step in self._steps[:gone]:
                self._forget(step)
        elif not (_same(self._steps, steps) and weights is self._weights):
            self._begin(steps, weights)
        # Of those that we hold already, whose ids therefore nothing else can have, it is known.
        self._sizes = {id(s): self._sizes.get(id(s)) or _largest(s) for s in steps}
        self._steps = steps

    def _begin(self, steps: Sequence[FixedUpdate], weights: Quanta) -> None:
        origin = weights.astype(np.int64)
        for step in steps:
            add_into(origin, step, -1)
        self._weights, self._origin = weights, origin.astype(np.int32)
        self.squared = 0
        for start in range(0, len(weights) if steps else 0, SEGMENT):
            part = self._between(start)
            self.squared += exact_dot(part, part)

    def _add(self, step: FixedUpdate) -> None:
        """`weights` contains it already: |t + s|^2 = |t|^2 + 2 (t + s) s - |s|^2."""
        self.squared += 2 * self.product(step) - exact_dot(step.values, step.values)

    def _forget(self, step: FixedUpdate) -> None:
        self.squared += exact_dot(step.values, step.values) - 2 * self.product(step)
        at = slice(None) if step.indices is None else step.indices
        self._origin[at] += step.values.astype(np.int32)

    def products(self, updates: Sequence[FixedUpdate]) -> list[int]:
        """The inner products of the trend with some updates.

        Piece by piece for all of them: the trend comes from memory once, and not once for each.
        """
        if sum(self._sizes.values()) >= VALUE_LIMIT:  # it may be too large for an int32
            return [self.product(update) for update in updates]
        sparse = [update for update in updates if update.indices is not None]
        met = [np.zeros(len(update.values), dtype=np.int64) for update in sparse]
        cuts = [Cut(update) for update in sparse]
        room = np.empty(min(CUT, len(self._weights)), dtype=np.int32)
        for start in range(0, len(self._weights) if cuts else 0, CUT):
            after, before = (w[start : start + CUT] for w in (self._weights, self._origin))
            piece = np.subtract(after, before, out=room[: len(after)])
            for cut, out in zip(cuts, met, strict=True):
                at, span = cut.piece(start)
                out[span] = piece[at]
        found = iter([exact_dot(u.values, m) for u, m in zip(sparse, met, strict=True)])
        return [self.product(u) if u.indices is None else next(found) for u in updates]

    def product(self, update: FixedUpdate) -> int:
        """The inner product of the trend with an update."""
        values, indices = update.values, update.indices
        if indices is not None:
            here = self._weights[indices].astype(np.int64)
            here -= self._origin[indices]
            return exact_dot(values, here)
        starts = range(0, len(values), SEGMENT)
        return sum(exact_dot(values[at : at + SEGMENT], self._between(at)) for at in starts)

    def _between(self, start: int) -> Ints:
        piece = self._weights[start : start + SEGMENT].astype(np.int64)
        piece -= self._origin[start : start + SEGMENT]
        return piece


def _largest(step: FixedUpdate) -> int:
    return magnitude(step.values) if len(step.values) else 0


def _same(ours: Sequence[FixedUpdate], theirs: Sequence[FixedUpdate]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
