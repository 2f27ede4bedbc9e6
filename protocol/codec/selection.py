"""Which coordinates are the largest, per chunk or overall: exact, mostly at the speed of memory.

A full selection in each chunk costs several times what the rest of the encoder does. Instead a
sample gives a threshold that a little more than k coordinates pass, and only those are sorted.
Where the sample misled (too few passed), the exact threshold is computed.

The vector is read once, in segments that stay in the cache: it may be one that is only made while
it is read (`Source`), as the difference of two.

Knows nothing of values' coding.
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
_SAMPLE_STRIDE = 8
_MIN_SAMPLE = 128
_OVERALL_STRIDE = 61  # a prime: meets all columns of a weight matrix


@runtime_checkable
class Source(Protocol):
    """A vector that need not be in memory: it is read once, segment by segment."""

    @property
    def size(self) -> int: ...

    def read(self, start: int, out: Float32s) -> Float32s:
        """As many coordinates as `out` has, from `start` on: in `out`, or wherever they are."""


@dataclass(frozen=True)
class Whole:
    """A vector that is in memory."""

    vector: Float32s

    @property
    def size(self) -> int:
        return self.vector.size

    def read(self, start: int, out: Float32s) -> Float32s:
        return self.vector[start : start + out.size]


def largest_per_chunk(
    vector: Float32s | Source, chunk: int, density: float
) -> tuple[Int64s, Float32s]:
    """Each chunk's largest magnitudes: increasing indices, and the values there.

    Of equals the first. Never zeros.
    """
    source = Whole(vector) if isinstance(vector, np.ndarray) else vector
    keep = kept_of(chunk, density)
    whole = source.size // chunk * chunk
    step = max(_SEGMENT // chunk, 1) * chunk
    room, magnitudes = np.empty((2, min(step, source.size)), dtype=np.float32)
    reached = np.empty(magnitudes.size, dtype=np.bool_)
    indices, values = [], []
    pieces = [(start, min(step, whole - start), keep) for start in range(0, whole, step)]
    if tail := source.size - whole:  # the last chunk is shorter and keeps its share
        pieces.append((whole, tail, kept_of(tail, density)))
    for start, length, kept in pieces:
        part = source.read(start, room[:length])
        shape = (length // chunk, chunk) if length >= chunk else (1, length)
        rows = np.abs(part, out=magnitudes[:length]).reshape(shape)
        found = _largest_in_rows(rows, kept, reached[:length].reshape(shape))
        values.append(part[found])
        indices.append(found + start)
    return np.concatenate(indices), np.concatenate(values)


def largest_overall(vector: Float32s | Source, density: float) -> tuple[Int64s, Float32s]:
    """The largest magnitudes of all: increasing indices, and the values there.

    Of equals the first. Never zeros.
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


def _largest_in_rows(magnitudes: Float32s, keep: int, reached: NDArray[np.bool_]) -> Int64s:
    """Flat indices of the `keep` largest of each row, increasing. `reached` is room to work in."""
    if not magnitudes.max() < np.inf:
        raise NonFiniteError("the vector contains NaN or Inf")
    rows, width = magnitudes.shape
    thresholds, exact = _thresholds(magnitudes, keep)
    np.greater_equal(magnitudes, thresholds[:, None], out=reached)
    passed, counts = _passed(reached)
    short = np.flatnonzero(counts < keep)
    if len(short) and not exact:
        thresholds[short] = _kth_largest(magnitudes[short], keep)
        reached[short] = magnitudes[short] >= thresholds[short, None]
        passed, counts = _passed(reached)
    found = magnitudes.reshape(-1)[passed]
    chosen = found >= np.repeat(_kth_of_ragged(found, counts, keep), counts)
    chosen &= found > 0
    firsts = np.cumsum(counts) - counts
    if (np.add.reduceat(chosen, firsts, dtype=np.int64) > keep).any():  # equals: the first of them
        return _ranked(found, passed, np.repeat(np.arange(rows), counts), counts, keep, width)
    return passed[chosen]


def _passed(reached: NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
    """Flat indices of what is true, and how many there are in each row."""
    rows, width = reached.shape
    passed = true_at(reached.reshape(-1))
    return passed, np.diff(np.searchsorted(passed, np.arange(rows + 1) * width))


def true_at(mask: NDArray[np.bool_]) -> Int64s:
    """`np.flatnonzero` of a mask of which a few per cent are true, in two thirds of its time.

    It jumps from one to the next, and a CPU guesses wrong where that is. Here whole words are
    looked at first: of those so many are true that numpy does it without a jump.
    """
    if mask.size % 8:
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
    """The k-th largest of each row, where row i has its `counts[i]` >= k values in `values`."""
    widest = int(counts.max())
    table = np.zeros((len(counts), widest), dtype=np.float32)
    table[np.arange(widest) < counts[:, None]] = values
    table.sort(axis=1)  # of rows this short faster than a partition
    return table[:, widest - k]


def _ranked(
    found: Float32s, passed: Int64s, row_of: Int64s, counts: Int64s, keep: int, width: int
) -> Int64s:
    """The `keep` largest of each row of candidates; of equals the first. No zeros.

    The bits of a float that is not negative are ordered as the float: one integer sort by (row,
    magnitude downwards, position) ranks all rows at once.
    """
    bits = found.view(np.int32).astype(np.int64)
    column_bits = max(width - 1, 1).bit_length()
    key = ((row_of << 31) | (0x7FFFFFFF - bits)) << column_bits | (passed - row_of * width)
    key.sort()
    firsts = np.cumsum(counts) - counts
    rank = np.arange(len(key)) - np.repeat(firsts, counts)
    key = key[rank < keep]
    row, column = key >> (31 + column_bits), key & ((1 << column_bits) - 1)
    nonzero = (key >> column_bits) & 0x7FFFFFFF != 0x7FFFFFFF
    return np.sort((row * width + column)[nonzero])


def _thresholds(magnitudes: Float32s, keep: int) -> tuple[NDArray[np.float32], bool]:
    """Per row a magnitude that at least `keep` coordinates should reach, and whether it is sure."""
    sample_size = magnitudes.shape[1] // _SAMPLE_STRIDE
    rank = _sample_rank(keep, _SAMPLE_STRIDE)
    if sample_size < _MIN_SAMPLE or rank >= sample_size:
        return _kth_largest(magnitudes, keep), True
    sample = np.ascontiguousarray(magnitudes[:, ::_SAMPLE_STRIDE])
    sample.sort(axis=1)  # of rows this short faster than a partition
    return sample[:, -rank], False


def _sample_rank(keep: int, stride: int) -> int:
    """The rank in the sample that is below the true threshold in all but a few of 1000 cases."""
    expected = keep / stride
    return int(expected + 3.0 * sqrt(expected)) + 1


def _kth_largest(magnitudes: Float32s, k: int) -> NDArray[np.float32]:
    position = magnitudes.shape[1] - k
    return np.partition(magnitudes, position, axis=1)[:, position]
