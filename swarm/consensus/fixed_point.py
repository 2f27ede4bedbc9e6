"""Updates and the consensus as integers: arithmetic that gives the same bits on every CPU.

Here for one vector; sums of several are `swarm.consensus.sums`'s part.

The consensus is an int32 vector in units of 2**-QUANTUM_BITS (|weight| < 128, resolution 6e-8,
finer than fp32 above 1). Integer addition is exact and commutes, so no CPU, thread count or library
version can change a bit of it; fp32 weights are derived from it. It costs no extra memory: a host
needs a copy of the consensus beside its running weights in any case, since its update is their
difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.digests import step_digest
from protocol.updates import UpdateError

Ints = npt.NDArray[np.int64]
Whole = npt.NDArray[np.signedinteger[Any]]  # int32, or int64 where int32 is too small
Quanta = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

QUANTUM_BITS = 24
VALUE_LIMIT = 2**31  # |value| of an update, in quanta: what int32 holds
SCALE_ONE = 1 << 16
SEGMENT = 1 << 15  # coordinates per pass: fits into a core's L2 cache with its temporaries
SHORT = 1 << 10  # for segments shorter than this the calls cost more than the work


@dataclass(frozen=True, eq=False)
class FixedUpdate:
    """A vector of `size` coordinates in quanta: all of them, or only those at `indices`.

    Decoded updates have int32 values, for half the memory and memory traffic: code that computes
    with them must make sure that results fit.
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
        """The squared norm."""
        return exact_dot(self.values, self.values, self.largest**2)

    @cached_property
    def digest(self) -> bytes:
        """The digest as a step, the same for the sparse and the dense form: of the shorter one."""
        short = self
        if self.indices is None or 2 * np.count_nonzero(self.values) >= self.size:
            short = compact(self.dense())
        elif not self.values.all():
            kept = np.flatnonzero(self.values)
            short = FixedUpdate(self.size, self.indices[kept], self.values[kept])
        return step_digest(short.size, short.indices, short.values)

    def dense(self) -> Ints:
        if self.indices is None:
            return self.values.astype(np.int64, copy=False)
        out = np.zeros(self.size, dtype=np.int64)
        out[self.indices] = self.values
        return out


def checked(update: FixedUpdate, size: int) -> FixedUpdate:
    """The update as int32. Raises UpdateError unless it is well formed for `size` weights."""
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


def exact_dot(a: Whole, b: Whole, largest: int | None = None) -> int:
    """Inner product as a Python int, exact for |a|, |b| < 2**35. `largest`: a bound, if known, of
    the product of two values.

    Computed in segments whose sum fits into an int64. Where these would be too short, values are
    split into halves of 18 bits: |high| <= 2**17 and low < 2**18, so a product is below 2**36 and
    the sum of a segment below 2**52.
    """
    if largest is None:
        largest = magnitude(a) * magnitude(b)
    length, total = ((1 << 63) - 1) // max(largest, 1), 0
    if length >= SHORT:
        for start in range(0, len(a), length):
            x, y = a[start : start + length], b[start : start + length]
            total += int(np.einsum("i,i->", x, y, dtype=np.int64))  # does not copy int32 to int64
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
    """update * scale / 65536, rounded toward zero so that the norm does not exceed the limit."""
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
    """total / count, halves away from zero: symmetric, so no drift builds up over rounds."""
    result: Whole = np.empty_like(total)
    half = count // 2  # exact for odd counts too, since totals are integers
    for start in range(0, len(total), SEGMENT):
        part = total[start : start + SEGMENT]
        if part.dtype == np.int32 and magnitude(part) + half >= VALUE_LIMIT:
            part = part.astype(np.int64)
        sign = part >> (8 * part.itemsize - 1)  # -1 of what is negative, else 0
        mean = np.abs(part)
        mean += half
        mean //= count
        mean ^= sign
        mean -= sign
        result[start : start + SEGMENT] = mean
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


def compact(dense: Whole) -> FixedUpdate:
    """A dense vector in its shorter form, sparse or dense (an index costs as much as a value)."""
    indices = np.flatnonzero(dense != 0).astype(np.int32)
    if 2 * len(indices) < len(dense):
        return FixedUpdate(len(dense), indices, dense[indices])
    return FixedUpdate(len(dense), None, dense)


def narrow(values: Whole) -> Whole:
    """The values as int32, if they fit."""
    fits = values.dtype != np.int32 and magnitude(values) < VALUE_LIMIT
    return values.astype(np.int32) if fits else values


def to_float(consensus: Quanta) -> Floats:
    """The fp32 weights of a consensus, correctly rounded."""
    made: Floats = np.empty(consensus.shape, dtype=np.float32)
    write_floats(consensus, made)
    return made


def write_floats(consensus: Quanta, out: Floats | Halves) -> None:
    """Write the weights of a consensus to `out`, in its precision."""
    for start in range(0, len(consensus), SEGMENT):  # in the cache
        part = consensus[start : start + SEGMENT].astype(np.float64)
        part *= 2.0**-QUANTUM_BITS
        out[start : start + SEGMENT] = part


def to_fixed(weights: Floats) -> Quanta:
    """The consensus nearest to fp32 weights, for a run's initial weights."""
    out = np.empty(weights.shape, dtype=np.int32)
    for start in range(0, len(weights), SEGMENT):
        part = weights[start : start + SEGMENT].astype(np.float64)
        part *= 2.0**QUANTUM_BITS
        np.rint(part, out=part)
        out[start : start + SEGMENT] = np.clip(part, -(VALUE_LIMIT - 1), VALUE_LIMIT - 1)
    return out
