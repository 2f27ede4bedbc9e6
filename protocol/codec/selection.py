"""Which coordinates are the largest, per chunk or overall: exact, mostly at the speed of memory.

A full selection in each chunk costs several times what the rest of the encoder does. Instead a
sample gives a threshold that a little more than k coordinates pass, and only those are sorted.
Where the sample misled (too few passed), the exact threshold is computed.

Knows nothing of values' coding.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from protocol.codec.errors import NonFiniteError
from protocol.codec.fixed import Float32s, Int64s
from protocol.codec.spec import kept_of

_SEGMENT = 1 << 17  # coordinates per pass
_SAMPLE_STRIDE = 8
_MIN_SAMPLE = 128
_OVERALL_STRIDE = 61  # a prime: meets all columns of a weight matrix


def largest_per_chunk(vector: Float32s, chunk: int, density: float) -> Int64s:
    """Increasing indices of each chunk's largest magnitudes; of equals the first. Never zeros."""
    keep = kept_of(chunk, density)
    whole = vector.size // chunk * chunk
    step = max(_SEGMENT // chunk, 1) * chunk
    buffer = np.empty(min(step, max(whole, 1)), dtype=np.float32)
    found = []
    for start in range(0, whole, step):
        part = vector[start : min(start + step, whole)]
        rows = buffer[: part.size].reshape(-1, chunk)
        np.abs(part.reshape(-1, chunk), out=rows)
        found.append(_largest_in_rows(rows, keep) + start)
    if whole < vector.size:  # the last chunk is shorter and keeps its share
        tail = np.abs(vector[whole:]).reshape(1, -1)
        found.append(_largest_in_rows(tail, kept_of(tail.size, density)) + whole)
    return np.concatenate(found)


def largest_overall(vector: Float32s, density: float) -> Int64s:
    """Increasing indices of the largest magnitudes of all; of equals the first. Never zeros."""
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
    return kept


def _at_least(vector: Float32s, threshold: np.float32) -> tuple[Int64s, Float32s]:
    """Indices and magnitudes of all coordinates that reach a threshold."""
    buffer = np.empty(min(_SEGMENT, vector.size), dtype=np.float32)
    indices, magnitudes = [], []
    for start in range(0, vector.size, _SEGMENT):
        part = vector[start : start + _SEGMENT]
        absolute = np.abs(part, out=buffer[: part.size])
        if not absolute.max() < np.inf:
            raise NonFiniteError("the vector contains NaN or Inf")
        passed = np.flatnonzero(absolute >= threshold)
        indices.append(passed + start)
        magnitudes.append(absolute[passed])
    return np.concatenate(indices), np.concatenate(magnitudes)


def _largest_in_rows(magnitudes: Float32s, keep: int) -> Int64s:
    """Flat indices of the `keep` largest of each row, increasing."""
    if not magnitudes.max() < np.inf:
        raise NonFiniteError("the vector contains NaN or Inf")
    rows, width = magnitudes.shape
    thresholds, exact = _thresholds(magnitudes, keep)
    reached = magnitudes >= thresholds[:, None]
    passed, counts = _passed(reached)
    short = np.flatnonzero(counts < keep)
    if len(short) and not exact:
        thresholds[short] = _kth_largest(magnitudes[short], keep)
        reached[short] = magnitudes[short] >= thresholds[short, None]
        passed, counts = _passed(reached)
    found = magnitudes.reshape(-1)[passed]
    row_of = np.repeat(np.arange(rows), counts)
    chosen = found >= _kth_of_ragged(found, row_of, counts, keep)[row_of]
    chosen &= found > 0
    if (np.bincount(row_of[chosen], minlength=rows) > keep).any():  # equals: the first of them
        return _ranked(found, passed, row_of, counts, keep, width)
    return passed[chosen]


def _passed(reached: NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
    """Flat indices of what is true, and how many there are in each row."""
    rows, width = reached.shape
    passed = np.flatnonzero(reached)
    return passed, np.diff(np.searchsorted(passed, np.arange(rows + 1) * width))


def _kth_of_ragged(values: Float32s, row_of: Int64s, counts: Int64s, k: int) -> NDArray[np.float32]:
    """The k-th largest of each row, where row i has its `counts[i]` >= k values in `values`."""
    table = np.zeros((len(counts), int(counts.max())), dtype=np.float32)
    firsts = np.cumsum(counts) - counts
    table[row_of, np.arange(len(values)) - firsts[row_of]] = values
    return _kth_largest(table, k)


def _ranked(
    found: Float32s, passed: Int64s, row_of: Int64s, counts: Int64s, keep: int, width: int
) -> Int64s:
    """The `keep` largest of each row of candidates; of equals the first.

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
    return _kth_largest(sample, rank), False


def _sample_rank(keep: int, stride: int) -> int:
    """The rank in the sample that is below the true threshold in all but a few of 1000 cases."""
    expected = keep / stride
    return int(expected + 3.0 * sqrt(expected)) + 1


def _kth_largest(magnitudes: Float32s, k: int) -> NDArray[np.float32]:
    position = magnitudes.shape[1] - k
    return np.partition(magnitudes, position, axis=1)[:, position]
