"""Exact sums and means of updates, inner products with them, and the step of a consensus.

Computed piece by piece: a piece of the vector stays in a core's cache while every update is added
to it, and inner products with the sum come from the same pass. Which updates are summed is
`swarm.consensus.aggregate`'s choice.
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

CUT = 1 << 17  # coordinates of a piece: large, since sparse updates have few values in it
RARE = 1000  # if fewer than one in so many is removed, copying the rest is cheaper than a mask
SPARSE = 10  # if fewer than one in so many is touched, sorting indices is cheaper than a scan


def summed(parts: Sequence[tuple[FixedUpdate, int]]) -> FixedUpdate:
    """The sum of updates, each with a multiplicity, in its shorter form."""
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
    """`summed_against` for sparse updates, the usual case, and the inner products of `others` with
    the vector `beside`.

    The values of all updates in a piece are processed in one call, since for the few of a single
    update the calls cost more than the work.
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
            # Copied first: a sequential read is faster than many scattered ones.
            met = beside[start : start + len(here)].copy().take(places)
            _add_products(along, values, met, cuts, largest * magnitude(met))
        few = SPARSE * len(places) < len(here)
        kept = _merged(places) if few else true_at(here != 0)
        sums = here.take(kept)
        if not sums.all():  # updates may cancel
            kept, sums = kept[sums != 0], sums[sums != 0]
        kept += start
        found.append((kept.astype(np.int32), sums))
    asked = len(others)
    return _joined(size, found), products[:asked], [] if beside is None else along[:asked]


def _together(
    updates: Sequence[FixedUpdate], spans: Sequence[slice]
) -> tuple[Ints, Whole, list[int]]:
    """Indices and values of a span of each sparse update, concatenated, and the bounds of each."""
    places = [u.indices[s] for u, s in zip(updates, spans, strict=True) if u.indices is not None]
    values = [update.values[span] for update, span in zip(updates, spans, strict=True)]
    cuts = [0, *accumulate(map(len, places))]
    return np.concatenate(places).astype(np.int64), np.concatenate(values), cuts


def _times(values: Whole, times: Sequence[int], cuts: Sequence[int], kind: np.dtype[Any]) -> Whole:
    """The values, each update's multiplied by its multiplicity."""
    values = values.astype(kind, copy=False)
    if all(count == 1 for count in times):
        return values
    product: Whole = values * np.repeat(np.array(times, dtype=kind), np.diff(cuts))
    return product


def _add_products(
    sums: list[int], values: Whole, met: Whole, cuts: Sequence[int], largest: int
) -> None:
    """Add to `sums` each update's inner product with `met`, the other vector at the same places.
    No product of two values exceeds `largest`."""
    spans = [(i, a, b) for i, (a, b) in enumerate(pairwise(cuts)) if a < b]
    if largest * len(values) < 1 << 63:
        each = np.multiply(values, met, dtype=np.int64)
        added = np.add.reduceat(each, [a for _, a, _ in spans]).tolist() if spans else []
    else:
        added = [exact_dot(values[a:b], met[a:b]) for _, a, b in spans]
    for (i, _, _), product in zip(spans, added, strict=True):
        sums[i] += product


def _merged(places: Ints) -> Ints:
    """The distinct numbers, ascending."""
    every = places.astype(np.int32)
    every.sort()
    first = np.empty(len(every), dtype=np.bool_)
    first[:1] = True
    np.not_equal(every[1:], every[:-1], out=first[1:])
    return every[first].astype(np.int64)


class Cut:
    """A sparse update cut into pieces of CUT coordinates."""

    def __init__(self, update: FixedUpdate) -> None:
        self.update = update
        self._ends = _ends(update)
        self._start, self._at, self._span = -1, np.zeros(0, dtype=np.int64), slice(0, 0)

    def piece(self, start: int) -> tuple[Ints, slice]:
        """Indices within the piece that begins at `start`, and the slice of their values."""
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
    """The sum of updates as (start, coordinates) of one piece after another.

    Pieces stay in the cache: for sparse updates no dense vector is written to memory. They are
    views of `whole` if that is given; otherwise a piece is valid until the next one.
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
    """Inner products of updates with a vector that is given in pieces."""

    def __init__(self, updates: Sequence[FixedUpdate]) -> None:
        self._updates, self._found = updates, [0] * len(updates)
        self._ends = [_ends(update) for update in updates]
        # The vector at the indices of each sparse update: one product at the end is cheaper.
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
    """Bounds of the pieces in a sparse update's values."""
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
    """A sum of updates divided by their work (`aggregate.work_of`), in its shorter form."""
    count, rest = divmod(work, WORK_ONE)
    if rest:
        values = narrow(rounded_mean(total.values.astype(np.int64) * WORK_ONE, work))
    else:  # the usual case, without int64
        values = narrow(rounded_mean(total.values, count))
    if total.indices is None:
        return compact(values)
    gone = np.flatnonzero(values == 0)  # a mean may be rounded to nothing
    return FixedUpdate(total.size, _without(total.indices, gone), _without(values, gone))


def _without(numbers: Whole, gone: Ints) -> Whole:
    """The numbers without those at the positions `gone`."""
    if RARE * len(gone) > len(numbers):
        return np.delete(numbers, gone)
    if not len(gone):
        return numbers
    first, *rest = np.split(numbers, gone)
    return np.concatenate([first, *(part[1:] for part in rest)])


def apply_step(
    consensus: Quanta, delta: FixedUpdate, room: Quanta | None = None
) -> tuple[Quanta, FixedUpdate]:
    """The next consensus (written to `room` if given), and the actual step.

    Weights are clamped to int32. The returned step has the clamped change, so every step of the log
    is exactly reversible: old + step = new and new - step = old.
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
