"""Exact selection of the largest coordinates, per chunk or overall, mostly at memory speed.

A full selection in each chunk costs several times as much as the rest of the encoder. Instead a
sample gives a threshold that a little more than k coordinates pass, and only those are sorted. If
too few pass, the exact threshold is computed.

The vector is read once, in segments that stay in the cache, so it may be computed while it is read
(`Source`), for example as the difference of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from protocol.codec.errors import NonFiniteError
from protocol.codec.fixed import Float32s, Int64s
from protocol.codec.spec import kept_of

_SEGMENT = 1 << 17  # coordinates per pass
_TOGETHER = 1 << 18  # candidates from which the largest are picked in one call
_SHORT_ROW = 1024  # up to this length sorting takes half as long as finding the k-th
_SAMPLE_STRIDE = 8
_MIN_SAMPLE = 128
_OVERALL_STRIDE = 61  # a prime: samples all columns of a weight matrix


@runtime_checkable
class Source(Protocol):
    """A vector that need not be in memory, read once, segment by segment."""

    @property
    def size(self) -> int: ...

    def read(self, start: int, out: Float32s) -> Float32s:
        """`out.size` coordinates from `start` on: in `out`, or a view of existing memory."""


@dataclass(frozen=True)
class Whole:
    """A vector in memory, as a `Source`."""

    vector: Float32s

    @property
    def size(self) -> int:
        return self.vector.size

    def read(self, start: int, out: Float32s) -> Float32s:
        return self.vector[start : start + out.size]


def largest_per_chunk(
    vector: Float32s | Source, chunk: int, density: float
) -> tuple[Int64s, Float32s]:
    """The coordinates of largest magnitude in each chunk: increasing indices, and their values.

    The first of equal ones; never zeros.
    """
    source = Whole(vector) if isinstance(vector, np.ndarray) else vector
    whole = source.size // chunk * chunk
    found = _largest_in_chunks(source, 0, whole, chunk, kept_of(chunk, density))
    if tail := source.size - whole:  # the last chunk is shorter and keeps its share
        found += _largest_in_chunks(source, whole, source.size, tail, kept_of(tail, density))
    return np.concatenate([at for at, _ in found]), np.concatenate([v for _, v in found])


def _largest_in_chunks(
    source: Source, first: int, stop: int, chunk: int, keep: int
) -> list[tuple[Int64s, Float32s]]:
    """Indices and values of the `keep` largest of each chunk in first..stop, as a list of parts.

    Candidates above their chunk's threshold are found segment by segment; the largest of them are
    picked for many segments at once, since for few the calls cost more than the work.
    """
    step = max(_SEGMENT // chunk, 1) * chunk
    room, magnitudes = np.empty((2, min(step, stop - first)), dtype=np.float32)
    reached = np.empty(magnitudes.size, dtype=np.bool_)
    found: list[tuple[Int64s, Float32s]] = []
    waiting: list[tuple[Int64s, Float32s, Int64s]] = []
    for start in range(first, stop, step):
        part = source.read(start, room[: min(step, stop - start)])
        rows = np.abs(part, out=magnitudes[: part.size]).reshape(-1, chunk)
        passed, counts = _passed(rows, keep, reached[: part.size].reshape(rows.shape))
        values = part.take(passed)
        passed += start
        waiting.append((passed, values, counts))
        if start + step >= stop or sum(len(p) for p, _, _ in waiting) > _TOGETHER:
            indices, values, counts = map(np.concatenate, zip(*waiting, strict=True))
            found.append(_kept(indices, values, counts, keep))
            waiting.clear()
    return found


def largest_overall(vector: Float32s | Source, density: float) -> tuple[Int64s, Float32s]:
    """The coordinates of largest magnitude overall: increasing indices, and their values.

    The first of equal ones; never zeros.
    """
    if not isinstance(vector, np.ndarray):
        vector = vector.read(0, np.empty(vector.size, dtype=np.float32))
    keep = kept_of(vector.size, density)
    sample = np.abs(vector[::_OVERALL_STRIDE]).reshape(1, -1)
    rank = _sample_rank(keep, _OVERALL_STRIDE)
    indices, magnitudes = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
    if rank < sample.size:
        indices, magnitudes = _at_least(vector, _kth_largest(sample, rank)[0])
    if len(indices) < keep:
        exact = _kth_largest(np.abs(vector).reshape(1, -1), keep)[0]
        indices, magnitudes = _at_least(vector, exact)
    threshold = _kth_largest(magnitudes.reshape(1, -1), keep)[0]
    chosen = magnitudes > threshold
    ties = np.flatnonzero(magnitudes == threshold)
    chosen[ties[: keep - np.count_nonzero(chosen)]] = True
    kept: Int64s = indices[chosen & (magnitudes > 0)]
    return kept, vector[kept]


def _at_least(vector: Float32s, threshold: np.float32) -> tuple[Int64s, Float32s]:
    """Indices and magnitudes of all coordinates that reach a threshold."""
    buffer = np.empty(min(_SEGMENT, vector.size), dtype=np.float32)
    indices, magnitudes = [], []
    for start in range(0, vector.size, _SEGMENT):
        part = vector[start : start + _SEGMENT]
        absolute = np.abs(part, out=buffer[: part.size])
        if not absolute.max() < np.inf:
            raise NonFiniteError("the vector contains NaN or Inf")
        passed = true_at(absolute >= threshold)
        indices.append(passed + start)
        magnitudes.append(absolute[passed])
    return np.concatenate(indices), np.concatenate(magnitudes)


def _passed(magnitudes: Float32s, keep: int, reached: NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
    """Flat indices of candidates, at least the `keep` largest of each row, and their number in each
    row; never zeros. `reached` is scratch memory.

    Magnitudes are compared by their bits as integers: the order is the same, and NaN is above all
    numbers, so that it is among the candidates and `_kept` refuses it.
    """
    bits = magnitudes.view(np.int32)
    thresholds, exact = _thresholds(magnitudes, keep)
    least = np.maximum(thresholds.view(np.int32), 1)  # a zero never passes
    np.greater_equal(bits, least[:, None], out=reached)
    passed, counts = _true_per_row(reached)
    short = np.flatnonzero((counts < keep) & (least > 1))
    if len(short) and not exact:
        least = np.maximum(_kth_largest(magnitudes[short], keep).view(np.int32), 1)
        reached[short] = bits[short] >= least[:, None]
        passed, counts = _true_per_row(reached)
    return passed, counts


def _true_per_row(reached: NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
    """Flat indices of true elements, and their number in each row."""
    rows, width = reached.shape
    passed = true_at(reached.reshape(-1))
    ends = passed.searchsorted(np.arange(0, (rows + 1) * width, width))
    return passed, ends[1:] - ends[:-1]


def _kept(passed: Int64s, values: Float32s, counts: Int64s, keep: int) -> tuple[Int64s, Float32s]:
    """The `keep` largest candidates of each row; `counts` is the number of candidates per row."""
    found = np.abs(values)
    if len(found) and not found.max() < np.inf:
        raise NonFiniteError("the vector contains NaN or Inf")
    chosen = found >= np.repeat(_kth_of_ragged(found, counts, keep), counts)
    if np.count_nonzero(chosen) > np.minimum(counts, keep).sum():  # of equal ones keep the first
        chosen = _ranked(found, np.repeat(np.arange(len(counts)), counts), counts, keep)
    at = np.flatnonzero(chosen)
    return passed[at], values[at]


def true_at(mask: NDArray[np.bool_]) -> Int64s:
    """`np.flatnonzero` for a mask with a few per cent true, in two thirds of its time.

    numpy branches on each element, and the CPU mispredicts where the true ones are. Words of 8
    elements are tested first: so many of them are true that numpy takes its branch-free path.
    """
    if mask.size % 8 or 16 * np.count_nonzero(mask) > mask.size:
        return np.flatnonzero(mask)
    words = mask.view(np.uint64)
    some = np.flatnonzero(words != 0)
    within = np.flatnonzero(words[some].view(np.bool_))
    found: Int64s = some[within >> 3]
    found <<= 3
    within &= 7
    found += within
    return found


def _kth_of_ragged(values: Float32s, counts: Int64s, k: int) -> NDArray[np.float32]:
    """The k-th largest of each row, or 0 if a row has fewer; row i has the next `counts[i]` of
    `values`."""
    widest = max(int(counts.max()), k)
    table = np.zeros((len(counts), widest), dtype=np.float32)
    before = np.arange(len(counts)) * widest - (np.cumsum(counts) - counts)
    table.reshape(-1)[np.repeat(before, counts) + np.arange(len(values))] = values
    return _kth_largest(table, k)


def _ranked(found: Float32s, row_of: Int64s, counts: Int64s, keep: int) -> NDArray[np.bool_]:
    """Mask of the `keep` largest candidates of each row; the first of equal ones.

    The bits of non-negative floats have the order of the floats: one stable sort by (row,
    descending magnitude) ranks all rows at once.
    """
    bits = found.view(np.int32).astype(np.int64)
    order = np.argsort((row_of << 31) | (0x7FFFFFFF - bits), kind="stable")
    firsts = np.cumsum(counts) - counts
    chosen = np.zeros(len(found), dtype=np.bool_)
    chosen[order[np.arange(len(found)) - np.repeat(firsts, counts) < keep]] = True
    return chosen


def _thresholds(magnitudes: Float32s, keep: int) -> tuple[NDArray[np.float32], bool]:
    """A magnitude per row that at least `keep` coordinates should reach, and if it is exact."""
    sample_size = magnitudes.shape[1] // _SAMPLE_STRIDE
    rank = _sample_rank(keep, _SAMPLE_STRIDE)
    if sample_size < _MIN_SAMPLE or rank >= sample_size:
        return _kth_largest(magnitudes, keep), True
    return _kth_largest(magnitudes[:, ::_SAMPLE_STRIDE], rank), False


def _sample_rank(keep: int, stride: int) -> int:
    """The rank in the sample whose value is below the true threshold in all but a few of 1000
    cases."""
    expected = keep / stride
    return int(expected + 3.0 * sqrt(expected)) + 1


def _kth_largest(magnitudes: Float32s, k: int) -> NDArray[np.float32]:
    position = magnitudes.shape[1] - k
    if magnitudes.shape[1] <= _SHORT_ROW:
        return np.sort(magnitudes, axis=1)[:, position]
    return np.partition(magnitudes, position, axis=1)[:, position]
