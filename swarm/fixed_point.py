"""Updates and the consensus as integers: sums, inner products and names that no CPU can change.

Decides the arithmetic. Knows nothing of whose updates they are, nor of which of them count
(`swarm.aggregate`).

The consensus is an int32 vector in units of 2**-QUANTUM_BITS (|weight| < 128, resolution 6e-8,
finer than fp32 above 1). Integer addition is exact and commutes, so no CPU, thread count or library
version can change a bit of it; fp32 weights are derived from it. It costs no memory: every host
needs one copy of the consensus beside its running weights in any case (its update is their
difference), and that copy is this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from protocol.codec.selection import true_at
from protocol.errors import WireError

Ints = npt.NDArray[np.int64]
Whole = npt.NDArray[np.signedinteger[Any]]  # int32, or int64 where it must be
Quanta = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

QUANTUM_BITS = 24
VALUE_LIMIT = 2**31  # |value| of an update, in quanta: what int32 holds
SCALE_ONE = 1 << 16
SEGMENT = 1 << 15  # coordinates per pass: what fits into a core's L2 cache with its temporaries
CUT = 1 << 17  # the same for sparse updates, which touch few of them, as int32
SHORT = 1 << 10  # a segment that is not worth its calls
RARE = 1000  # fewer than one in so many: copying what is between them is cheaper than a mask
SPARSE = 10  # below one in so many it is cheaper to sort their places than to look at all


class UpdateError(WireError):
    """An update that no honest codec produces: wrong size, order, range."""


@dataclass(frozen=True, eq=False)
class FixedUpdate:
    """A vector of `size` coordinates in quanta: all of them, or only those at `indices`.

    Of int32 where they come from a codec: half the memory, and half the time that goes into moving
    it. So whoever computes with them must see that the result fits.
    """

    size: int
    indices: Whole | None
    values: Whole

    @cached_property
    def largest(self) -> int:
        """The largest magnitude."""
        return magnitude(self.values)

    @cached_property
    def squared(self) -> int:
        """The inner product with itself."""
        return exact_dot(self.values, self.values, self.largest**2)

    def dense(self) -> Ints:
        if self.indices is None:
            return self.values.astype(np.int64, copy=False)
        out = np.zeros(self.size, dtype=np.int64)
        out[self.indices] = self.values
        return out

    def same_as(self, other: FixedUpdate) -> bool:
        return self.size == other.size and bool(np.array_equal(self.dense(), other.dense()))


def checked(update: FixedUpdate, size: int) -> FixedUpdate:
    """The same update if it is well formed for a block of `size` weights; otherwise UpdateError."""
    values, indices = update.values, update.indices
    if update.size != size:
        raise UpdateError(f"update of {update.size} weights for a block of {size}")
    if values.ndim != 1 or values.dtype.kind != "i":
        raise UpdateError("update values are not a vector of integers")
    if len(values) and not (int(values.min()) > -VALUE_LIMIT and int(values.max()) < VALUE_LIMIT):
        raise UpdateError("update value out of range")
    if indices is None:
        if len(values) != size:
            raise UpdateError(f"dense update with {len(values)} of {size} values")
    else:
        if indices.ndim != 1 or indices.dtype.kind != "i" or len(indices) != len(values):
            raise UpdateError("update indices do not match its values")
        if len(indices) and (
            int(indices[0]) < 0
            or int(indices[-1]) >= min(size, VALUE_LIMIT)
            or bool(np.any(indices[1:] <= indices[:-1]))
        ):
            raise UpdateError("update indices are not ascending within the block")
        indices = indices.astype(np.int32, copy=False)
    return FixedUpdate(size, indices, values.astype(np.int32, copy=False))


def from_codec(size: int, indices: Ints | None, values: Ints, bits: int) -> FixedUpdate:
    """A decoded update (units of 2**-bits, bits >= QUANTUM_BITS) in quanta, checked.

    Halves are rounded away from zero. The sender does the same to its own update before it books
    it, so what the rounding drops stays unsent.
    """
    unit = 1 << (bits - QUANTUM_BITS)
    if values.ndim != 1 or values.dtype.kind != "i":
        raise UpdateError("update values are not a vector of integers")
    if len(values) and max(int(values.max()), -int(values.min())) >= VALUE_LIMIT * unit - unit:
        raise UpdateError("update value out of range")
    return checked(FixedUpdate(size, indices, rounded_mean(values.astype(np.int64), unit)), size)


def exact_dot(a: Whole, b: Whole, largest: int | None = None) -> int:
    """Inner product as a Python int, exact for |a|, |b| < 2**35. `largest`, if it is known, is what
    no product of two values exceeds.

    In segments so short that their sum of products fits into an int64. Where that would be too
    short, both are cut into halves of 18 bits: |high| <= 2**17 and low < 2**18, so a product is
    below 2**36 and the sum of a segment below 2**52.
    """
    if largest is None:
        largest = magnitude(a) * magnitude(b)
    length, total = ((1 << 63) - 1) // max(largest, 1), 0
    if length >= SHORT:
        for start in range(0, len(a), length):
            x, y = a[start : start + length], b[start : start + length]
            total += int(np.einsum("i,i->", x, y, dtype=np.int64))  # makes no copies of int32
        return total
    for start in range(0, len(a), SEGMENT):
        x = a[start : start + SEGMENT].astype(np.int64, copy=False)
        y = b[start : start + SEGMENT].astype(np.int64, copy=False)
        x1, x0, y1, y0 = x >> 18, x & 0x3FFFF, y >> 18, y & 0x3FFFF
        middle = int(np.dot(x1, y0)) + int(np.dot(x0, y1))
        total += (int(np.dot(x1, y1)) << 36) + (middle << 18) + int(np.dot(x0, y0))
    return total


def magnitude(values: Whole) -> int:
    return max(int(values.max()), -int(values.min())) if len(values) else 0


def norm(update: FixedUpdate) -> int:
    """Euclidean norm in quanta, rounded down."""
    return isqrt(update.squared)


def scaled(update: FixedUpdate, scale: int) -> FixedUpdate:
    """update * scale / 65536, rounded toward zero: never longer than asked (at most 65536)."""
    if scale == SCALE_ONE:
        return update
    values = np.empty(len(update.values), dtype=update.values.dtype)
    for start in range(0, len(values), SEGMENT):
        part = update.values[start : start + SEGMENT]
        less = np.abs(part.astype(np.int64, copy=False))
        less *= scale
        less >>= 16
        np.negative(less, out=less, where=part < 0)
        values[start : start + SEGMENT] = less
    return FixedUpdate(update.size, update.indices, values)


def rounded_mean(total: Whole, count: int) -> Whole:
    """total / count, halves away from zero: symmetric, so that no drift builds up over rounds."""
    result: Whole = np.empty_like(total)
    for start in range(0, len(total), SEGMENT):
        part, out = total[start : start + SEGMENT], result[start : start + SEGMENT]
        if magnitude(part) < 1 << 51:
            # Exact, and several times as fast as dividing integers: a quotient that is no integer
            # is at least 1 / (2 * count) below the next one, which is more than a double rounds.
            mean = part.astype(np.float64)
            mean += np.copysign(count / 2, mean)
            mean /= count
            out[:] = np.trunc(mean, out=mean)
            continue
        np.abs(part, out=out)
        out *= 2
        out += count
        out //= 2 * count
        np.negative(out, out=out, where=part < 0)
    return result


def add_into(total: Ints, update: FixedUpdate, times: int = 1) -> None:
    """total += times * update, in place."""
    at = slice(None) if update.indices is None else update.indices
    if times == 1:
        total[at] += update.values
    elif times == -1:
        total[at] -= update.values
    else:
        total[at] += times * update.values.astype(np.int64, copy=False)


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

    Each is looked at once per piece, and what the vectors are where it has values is written down
    for the products.
    """
    size = parts[0][0].size
    most = sum(abs(times) * part.largest for part, times in parts)
    total: Whole = np.empty(min(CUT, size), dtype=np.int32 if most < VALUE_LIMIT else np.int64)
    mask = np.empty(len(total), dtype=np.bool_)
    cuts = [Cut(update) for update in others]
    known = {id(cut.update): cut for cut in cuts}
    adding = [(known.get(id(part)) or Cut(part), times) for part, times in parts]
    met, along = Met(others, total.dtype), None if beside is None else Met(others, beside.dtype)
    found: list[tuple[Whole, Whole]] = []
    for start in range(0, size, CUT):
        stop = min(start + CUT, size)
        here, some = total[: stop - start], mask[: stop - start]
        here.fill(0)
        for cut, times in adding:
            at, span = cut.piece(start)
            values = cut.update.values[span].astype(here.dtype, copy=False)
            np.add.at(here, at, values if times == 1 else times * values)
        met.note(cuts, start, here)
        if along is not None and beside is not None:
            # A copy comes from memory in order; the values themselves are far apart.
            along.note(cuts, start, beside[start:stop].copy())
        places = [cut.piece(start)[0] for cut, _ in adding]
        if SPARSE * sum(map(len, places)) < len(here):
            kept = _merged(places)
        else:
            kept = true_at(np.not_equal(here, 0, out=some))
        values = here.take(kept)
        if not values.all():  # they cancel
            kept, values = kept[values != 0], values[values != 0]
        kept += start
        found.append((kept.astype(np.int32), values))
    return _joined(size, found), met.products(most), [] if along is None else along.products()


class Met:
    """What a vector that comes in pieces is where sparse updates have values."""

    def __init__(self, updates: Sequence[FixedUpdate], kind: np.dtype[Any]) -> None:
        self._updates = updates
        self._found: list[Whole] = [np.empty(len(u.values), dtype=kind) for u in updates]

    def note(self, cuts: Sequence[Cut], start: int, piece: Whole) -> None:
        """A piece of the vector; `cuts` are those of the updates."""
        for cut, out in zip(cuts, self._found, strict=True):
            at, span = cut.piece(start)
            np.take(piece, at, out=out[span], mode="clip")  # `raise` would take a copy

    def products(self, most: int | None = None) -> list[int]:
        """The inner products of the updates with the vector, of which no value exceeds `most`."""
        products = []
        for update, met in zip(self._updates, self._found, strict=True):
            largest = update.largest * (magnitude(met) if most is None else most)
            products.append(exact_dot(update.values, met, largest))
        return products


def _merged(places: Sequence[Ints]) -> Ints:
    """Ascending lists as one, each number once."""
    every = np.concatenate(places).astype(np.int32)
    every.sort()  # not `stable`: merging what ascends already takes twice as long
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


def compact(dense: Whole) -> FixedUpdate:
    """The shorter of the two forms of a dense vector (an index costs as much as a value)."""
    indices = np.flatnonzero(dense != 0).astype(np.int32)
    if 2 * len(indices) < len(dense):
        return FixedUpdate(len(dense), indices, dense[indices])
    return FixedUpdate(len(dense), None, dense)


def mean_step(total: FixedUpdate, count: int) -> FixedUpdate:
    """The rounded mean of a sum of updates, in its shorter form."""
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


def narrow(values: Whole) -> Whole:
    """As int32, if they fit."""
    fits = values.dtype != np.int32 and magnitude(values) < VALUE_LIMIT
    return values.astype(np.int32) if fits else values


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


def to_float(consensus: Quanta, out: Floats | None = None) -> Floats:
    """The fp32 weights of a consensus (in `out` if there is one): one correctly rounded division by
    a power of two."""
    made: Floats = np.empty(consensus.shape, dtype=np.float32) if out is None else out
    for start in range(0, len(consensus), SEGMENT):  # in the cache
        part = consensus[start : start + SEGMENT].astype(np.float64)
        part *= 2.0**-QUANTUM_BITS
        made[start : start + SEGMENT] = part
    return made


def to_fixed(weights: Floats) -> Quanta:
    """The nearest consensus to fp32 weights (used once, for a run's first weights)."""
    out = np.empty(weights.shape, dtype=np.int32)
    for start in range(0, len(weights), SEGMENT):
        part = weights[start : start + SEGMENT].astype(np.float64)
        part *= 2.0**QUANTUM_BITS
        np.rint(part, out=part)
        out[start : start + SEGMENT] = np.clip(part, -(VALUE_LIMIT - 1), VALUE_LIMIT - 1)
    return out


def weights_digest(consensus: Quanta) -> bytes:
    """The name of a consensus: BLAKE3 over its little-endian int32 values."""
    state = blake3(b"blockswarm weights 2")
    state.update(len(consensus).to_bytes(8, "big"))
    state.update(_little_endian(consensus))
    return state.digest()


def step_digest(delta: FixedUpdate) -> bytes:
    """The name of a step, whatever form it is held in: of all its values if that is shorter."""
    short = delta
    if delta.indices is None or 2 * np.count_nonzero(delta.values) >= delta.size:
        short = compact(delta.dense())
    elif not delta.values.all():
        kept = np.flatnonzero(delta.values)
        short = FixedUpdate(delta.size, delta.indices[kept], delta.values[kept])
    state = blake3(b"blockswarm step 3")
    state.update(delta.size.to_bytes(8, "big"))
    state.update(b"dense" if short.indices is None else b"sparse")
    for numbers in (short.indices, short.values):
        if numbers is not None:
            state.update(_little_endian(numbers))
    return state.digest()


def _little_endian(numbers: Whole) -> memoryview:
    """As int32, which holds every weight, every index and every value of a step."""
    if numbers.dtype.itemsize > 4 and len(numbers):
        lowest, highest = int(numbers.min()), int(numbers.max())
        if not -VALUE_LIMIT <= lowest <= highest < VALUE_LIMIT:
            raise ValueError(f"{lowest} to {highest}: no step has such values")
    return np.ascontiguousarray(numbers, dtype="<i4").view(np.uint8).data
