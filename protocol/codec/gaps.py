"""Increasing indices as gaps: a class per gap, entropy-coded by zstd, and the bits below it.

A gap of g coordinates is written as a small float (two mantissa bits below the leading one): its
class says the leading bits, and the rest is noise that is stored as it is. Classes go to a section
of their own, one per byte, where zstd's Huffman stage fits its code to whatever the gaps look
like. For independent coordinates that is within 1 % of the entropy; a Rice code is as good there,
but the updates of real models are clustered: on one of a small Transformer's blocks the classes
took 5 % (chunks of 4096) to 11 % (chunks of 65536) fewer bits than the best Rice code.

Knows nothing of values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protocol.codec.errors import CorruptPayloadError
from protocol.codec.fixed import Int64s
from protocol.codec.sections import Bytes

MANTISSA_BITS = 2
MAX_SHIFT = 28  # a gap has at most 31 bits
MAX_CLASS = (MAX_SHIFT << MANTISSA_BITS) + (2 << MANTISSA_BITS) - 1


def pack_gaps(indices: Int64s) -> tuple[Bytes, Bytes]:
    """(classes, low bits). Low bits are grouped by how many a gap has: 1 first, then 2, ..."""
    gaps = np.diff(indices, prepend=-1) - 1
    bit_length = np.frexp(gaps.astype(np.float64))[1].astype(np.int64)
    shifts = np.maximum(bit_length - (MANTISSA_BITS + 1), 0)
    classes = (shifts << MANTISSA_BITS) + (gaps >> shifts)
    as_bytes = gaps.astype("<u4").view(np.uint8).reshape(-1, 4)
    groups = [
        np.unpackbits(as_bytes[shifts == shift], axis=1, count=shift, bitorder="little").ravel()
        for shift in range(1, int(shifts.max(initial=0)) + 1)
    ]
    low = np.concatenate(groups) if groups else np.zeros(0, dtype=np.uint8)
    return classes.astype(np.uint8), np.packbits(low, bitorder="little")


def class_shifts(classes: Bytes) -> Int64s:
    """How many low bits belong to each class."""
    if classes.max(initial=0) > MAX_CLASS:
        raise CorruptPayloadError(f"gap class {classes.max()} is above {MAX_CLASS}")
    return np.maximum((classes >> MANTISSA_BITS).astype(np.int64) - 1, 0)


def unpack_gaps(classes: Bytes, shifts: Int64s, low: Bytes, size: int) -> Int64s:
    """Indices, strictly increasing by construction, checked to be below `size`."""
    bits = np.unpackbits(low, bitorder="little")
    gaps = (classes - (shifts << MANTISSA_BITS)) << shifts
    start = 0
    for shift in range(1, int(shifts.max(initial=0)) + 1):
        members = np.flatnonzero(shifts == shift)
        stop = start + shift * len(members)
        gaps[members] |= _as_integers(bits[start:stop].reshape(-1, shift))
        start = stop
    if bits[start:].any():
        raise CorruptPayloadError("padding bits are not zero")
    indices = np.cumsum(gaps + 1) - 1
    if len(indices) and indices[-1] >= size:
        raise CorruptPayloadError(f"index {indices[-1]} of {size} coordinates")
    return indices


def _as_integers(bits: NDArray[np.uint8]) -> Int64s:
    wide = np.zeros((len(bits), 4), dtype=np.uint8)
    grouped = np.packbits(bits, axis=1, bitorder="little")
    wide[:, : grouped.shape[1]] = grouped
    return wide.view("<u4").reshape(-1).astype(np.int64)
