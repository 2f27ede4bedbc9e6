"""Sums of updates, their mean, and the step that a consensus makes: exact, piece by piece.

A piece of the vector stays in a core's cache while every update is added to it, and inner products
with the sum come from the same pass. Decides how that is done fast; which updates are summed, and
what for, is `swarm.consensus.aggregate`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from protocol.codec.selection import true_at
from protocol.limits import WORK_ONE
from swarm.consensus.fixed_point import (
    SEGMENT,
    VALUE_LIMIT,
    FixedUpdate,
    Ints,
    Quanta,
    Whole,
    add_into,
    compact,
    exact_dot,
    magnitude,
    narrow,
    rounded_mean,
)

CUT = 1 << 17  # coordinates per pass of sparse updates, which touch few of them
RARE = 1000  # fewer than one in so many: copying what is between them is cheaper than a mask
SPARSE = 10  # below one in so many it is cheaper to sort their places than to look at all


def summed(parts: Sequence[tuple[FixedUpdate, int]]) -> FixedUpdate:
    """The sum of updates, each taken so many times, in its shorter form."""
    return summed_against(parts, ())[0]


def summed_against(
    parts: Sequence[tuple[FixedUpdate, int]], others: Sequence[FixedUpdate]
) -> tuple[FixedUpdate, list[int]]:
    """The sum of `parts`, and the inner product of each of `others` with it."""
    if all(update.indices is not None for update in (*(part for part, _ in parts), *others)):
        total, products, _ = sparse_against(parts, others)
        return total, products
    size, dense = parts[0][0].size, any(part.indices is None for part, _ in parts)
    whole = np.empty(size if dense else 0, dtype=np.int64)
    found: list[tuple[Whole, Whole]] = []
    against = Products(others)
    for start, here in pieces(parts, whole if dense else None):
        against.add(start, here)
        if not dense:
            kept = true_at(here != 0)
            found.append((kept + start, here[kept]))
    return (compact(whole) if dense else _joined(size, found)), against.done()


def sparse_against(
    parts: Sequence[tuple[FixedUpdate, int]],
    others: Sequence[FixedUpdate],
    beside: Whole | None = None,
) -> tuple[FixedUpdate, list[int], list[int]]:
    """`summed_against` where all are sparse, as those of a round mostly are; and the inner products
    of `others` with the vector `beside`.

    What all of them have in a piece is looked at together: of so little the calls would cost more
    than the work.
    """
    size = parts[0][0].size
    every, times = list(others), [0] * len(others)
    number_of = {id(update): number for number, update in enumerate(others)}
    for part, count in parts:
        number = number_of.setdefault(id(part), len(every))
        if number == len(every):
            every.append(part)
            times.append(0)
        times[number] += count
    most = sum(abs(n) * update.largest for n, update in zip(times, every, strict=True))
    largest = max(update.largest for update in every)
    total: Whole = np.empty(min(CUT, size), dtype=np.int32 if most < VALUE_LIMIT else np.int64)
    ends = [_ends(update) for update in every]
    products, along = [0] * len(every), [0] * len(every)
    found: list[tuple[Whole, Whole]] = []
    for piece, start in enumerate(range(0, size, CUT)):
        here = total[: min(CUT, size - start)]
        spans = [slice(at[piece], at[piece + 1]) for at in ends]
        places, values, cuts = _together(every, spans)
        places -= start
        here.fill(0)
        np.add.at(here, places, _times(values, times, cuts, here.dtype))
        _add_products(products, values, here.take(places), cuts, largest * most)
        if beside is not None:
            # A copy comes from memory in order; the values themselves are far apart.
            met = beside[start : start + len(here)].copy().take(places)
            _add_products(along, values, met, cuts, largest * magnitude(met))
        few = SPARSE * len(places) < len(here)
        kept = _merged(places) if few else true_at(here != 0)
        sums = here.take(kept)
        if not sums.all():  # they cancel
            kept, sums = kept[sums != 0], sums[sums != 0]
        kept += start
        found.append((kept.astype(np.int32), sums))
    asked = len(others)
    return _joined(size, found), products[:asked], [] if beside is None else along[:asked]


def _together(
    updates: Sequence[FixedUpdate], spans: Sequence[slice]
) -> tuple[Ints, Whole, list[int]]:
    """Places and values of a span of each sparse update, one after another; where each begins, and
    the last one ends."""
    places = [u.indices[s] for u, s in zip(updates, spans, strict=True) if u.indices is not None]
    values = [update.values[span] for update, span in zip(updates, spans, strict=True)]
    cuts = [0, *accumulate(map(len, places))]
    return np.concatenate(places).astype(np.int64), np.concatenate(values), cuts


def _times(values: Whole, times: Sequence[int], cuts: Sequence[int], kind: np.dtype[Any]) -> Whole:
    """Each update's values so many times."""
    values = values.astype(kind, copy=False)
    if all(count == 1 for count in times):
        return values
    product: Whole = values * np.repeat(np.array(times, dtype=kind), np.diff(cuts))
    return product


def _add_products(
    sums: list[int], values: Whole, met: Whole, cuts: Sequence[int], largest: int
) -> None:
    """Add each update's inner product with what its values met; none of theirs is above
    `largest`."""
    spans = [(i, a, b) for i, (a, b) in enumerate(pairwise(cuts)) if a < b]
    if largest * len(values) < 1 << 63:
        each = np.multiply(values, met, dtype=np.int64)
        added = np.add.reduceat(each, [a for _, a, _ in spans]).tolist() if spans else []
    else:
        added = [exact_dot(values[a:b], met[a:b]) for _, a, b in spans]
    for (i, _, _), product in zip(spans, added, strict=True):
        sums[i] += product


def _merged(places: Ints) -> Ints:
    """Ascending, each number once."""
    every = places.astype(np.int32)
    every.sort()
    first = np.empty(len(every), dtype=np.bool_)
    first[:1] = True
    np.not_equal(every[1:], every[:-1], out=first[1:])
    return every[first].astype(np.int64)


class Cut:
    """A sparse update, piece by piece."""

    def __init__(self, update: FixedUpdate) -> None:
        self.update = update
        self._ends = _ends(update)
        self._start, self._at, self._span = -1, np.zeros(0, dtype=np.int64), slice(0, 0)

    def piece(self, start: int) -> tuple[Ints, slice]:
        """The places of its values in the piece that begins at `start`, and which values."""
        if start != self._start:
            assert self.update.indices is not None
            number = start // CUT
            self._span = slice(self._ends[number], self._ends[number + 1])
            self._start, self._at = start, self.update.indices[self._span].astype(np.int64)
            self._at -= start
        return self._at, self._span


def pieces(
    parts: Sequence[tuple[FixedUpdate, int]], whole: Ints | None = None
) -> Iterator[tuple[int, Ints]]:
    """The sum of updates, one piece after another: where it starts, and its coordinates.

    A piece stays in the cache: of sparse updates no dense vector is ever written to memory. Without
    `whole` to write to, a piece is valid until the next one.
    """
    size = parts[0][0].size
    scratch = np.empty(min(CUT, size), dtype=np.int64) if whole is None else whole
    ends = [_ends(part) for part, _ in parts]
    for number, start in enumerate(range(0, size, CUT)):
        stop = min(start + CUT, size)
        total = scratch[: stop - start] if whole is None else scratch[start:stop]
        total.fill(0)
        for (part, times), at in zip(parts, ends, strict=True):
            if part.indices is None:
                piece = FixedUpdate(len(total), None, part.values[start:stop])
            else:
                here = slice(at[number], at[number + 1])
                piece = FixedUpdate(len(total), part.indices[here] - start, part.values[here])
            add_into(total, piece, times)
        yield start, total


class Products:
    """Inner products of updates with a vector that comes in pieces."""

    def __init__(self, updates: Sequence[FixedUpdate]) -> None:
        self._updates, self._found = updates, [0] * len(updates)
        self._ends = [_ends(update) for update in updates]
        # What the vector is where a sparse update has values: one product at the end is cheaper.
        self._met: list[list[Ints]] = [[] for _ in updates]

    def add(self, start: int, total: Ints) -> None:
        number = start // CUT
        for i, (update, ends) in enumerate(zip(self._updates, self._ends, strict=True)):
            if update.indices is None:
                self._found[i] += exact_dot(update.values[start : start + len(total)], total)
            else:
                here = slice(ends[number], ends[number + 1])
                self._met[i].append(total[update.indices[here] - start])

    def done(self) -> list[int]:
        return [
            product + (exact_dot(update.values, np.concatenate(met)) if met else 0)
            for product, update, met in zip(self._found, self._updates, self._met, strict=True)
        ]


def _ends(update: FixedUpdate) -> list[int]:
    """Where each piece of a sparse update begins, and the last one ends."""
    if update.indices is None:
        return []
    bounds = np.minimum(np.arange(0, update.size + CUT, CUT), update.size)
    found = np.searchsorted(update.indices, bounds.astype(update.indices.dtype))
    ends: list[int] = found.tolist()
    return ends


def _joined(size: int, found: Sequence[tuple[Whole, Whole]]) -> FixedUpdate:
    nothing = np.zeros(0, dtype=np.int32)
    indices = np.concatenate([at for at, _ in found]) if found else nothing
    values = np.concatenate([v for _, v in found]) if found else nothing
    sparse = FixedUpdate(size, indices.astype(np.int32, copy=False), values)
    return sparse if 2 * len(indices) < size else FixedUpdate(size, None, sparse.dense())


def mean_step(total: FixedUpdate, work: int) -> FixedUpdate:
    """A sum of updates divided by the work that they come to, rounded, in its shorter form."""
    count, rest = divmod(work, WORK_ONE)
    if rest:
        values = narrow(rounded_mean(total.values.astype(np.int64) * WORK_ONE, work))
    else:  # as mostly: there is no need to widen anything
        values = narrow(rounded_mean(total.values, count))
    if total.indices is None:
        return compact(values)
    gone = np.flatnonzero(values == 0)  # a mean may be rounded to nothing
    return FixedUpdate(total.size, _without(total.indices, gone), _without(values, gone))


def _without(numbers: Whole, gone: Ints) -> Whole:
    """Those that are not at these places."""
    if RARE * len(gone) > len(numbers):
        return np.delete(numbers, gone)
    if not len(gone):
        return numbers
    first, *rest = np.split(numbers, gone)
    return np.concatenate([first, *(part[1:] for part in rest)])


def apply_step(
    consensus: Quanta, delta: FixedUpdate, room: Quanta | None = None
) -> tuple[Quanta, FixedUpdate]:
    """The next consensus (written to `room` if there is one), and the step as it really was.

    A weight that would leave int32 stays at its edge; the returned step says so, which makes every
    step of the log exactly reversible: old + step = new and new - step = old.
    """
    edge = VALUE_LIMIT - 1
    new, whole = np.empty_like(consensus) if room is None else room, True
    if delta.indices is not None:
        cut, values = Cut(delta), narrow(delta.values)
        largest = delta.largest
        for start in range(0, len(consensus), CUT):
            here = new[start : start + CUT]
            here[:] = consensus[start : start + CUT]
            at, span = cut.piece(start)
            after: Whole = here.take(at, mode="clip")
            if magnitude(after) + largest <= edge:
                after += values[span]
            else:
                after = after + values[span].astype(np.int64)
                whole = whole and magnitude(after) <= edge
                np.clip(after, -edge, edge, out=after)
            here[at] = after
        if whole:
            return new, FixedUpdate(delta.size, delta.indices, values)
        changed = new[delta.indices].astype(np.int64) - consensus[delta.indices]
        return new, compact(FixedUpdate(delta.size, delta.indices, changed).dense())
    for start in range(0, len(consensus), SEGMENT):
        part = consensus[start : start + SEGMENT].astype(np.int64)
        part += delta.values[start : start + SEGMENT]
        whole = whole and magnitude(part) <= edge
        new[start : start + SEGMENT] = np.clip(part, -edge, edge)
    return new, delta if whole else compact(new.astype(np.int64) - consensus)
