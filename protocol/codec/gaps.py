"""Increasing indices as gaps, a byte for each: zstd fits its code to them, and a sum undoes them.

A gap's lowest bits are noise and are stored as they are: so many of each, `shift`, that what is
above them mostly fits into a byte. At the density of an ordinary update (2 %) there are none, and
the byte is the gap. Where a gap is longer, bytes of 255 go before its own, each of which says: 255
further, and no coordinate here. zstd's Huffman stage then takes what the gaps really look like: for
independent coordinates that is within 1 % of the entropy, and the updates of real models are
clustered, which takes fewer bits than any code that is fitted to their density alone.

Knows nothing of values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.codec.errors import CorruptPayloadError
from protocol.codec.fixed import Int32s, Ints
from protocol.codec.sections import Bytes

ESCAPE = 255
MAX_SHIFT = 25  # of one coordinate in 2^31
_TYPICAL_BITS = 6  # of what is above the low bits: an escape is rare, and a byte has room for more


def gap_shift(size: int, count: int) -> int:
    """How many low bits a gap has, where `count` of `size` coordinates are kept."""
    return max((size // max(count, 1)).bit_length() - _TYPICAL_BITS, 0)


def most_gap_bytes(size: int, count: int, shift: int) -> int:
    """How many bytes the gaps can have at most: all escapes together stay below `size`."""
    return count + size // (ESCAPE << shift)


def pack_gaps(indices: Ints, shift: int) -> tuple[Bytes, Bytes]:
    """(a byte per gap and their escapes, low bits)."""
    gaps = np.empty(len(indices), dtype=np.uint32)
    gaps[:1] = indices[:1]
    np.subtract(indices[1:], indices[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    upper = gaps >> np.uint32(shift)
    long = np.flatnonzero(upper >= ESCAPE)
    escapes = np.repeat(long, upper[long] // ESCAPE)
    upper[long] %= ESCAPE
    data: Bytes = upper.astype(np.uint8)
    return np.insert(data, escapes, ESCAPE) if len(escapes) else data, _pack_low(gaps, shift)


def unpack_gaps(data: Bytes, low: Bytes, shift: int, count: int, size: int) -> Int32s:
    """Indices, strictly increasing by construction, checked to be below `size`."""
    escaped = data == ESCAPE
    escapes = int(np.count_nonzero(escaped))
    if len(data) - escapes != count or (count and escaped[-1]) or (escapes and not count):
        raise CorruptPayloadError(f"{len(data)} bytes for {count} gaps, {escapes} of them escapes")
    lows = _unpack_low(low, shift, count)
    last = (int(data.sum(dtype=np.int64)) << shift) + int(lows.sum(dtype=np.int64)) + count - 1
    if last >= size:
        raise CorruptPayloadError(f"index {last} of {size} coordinates")
    indices = np.cumsum(data, dtype=np.int32)  # none is above the last, which fits
    if escapes:
        indices = indices[~escaped]
    if shift:
        indices <<= shift
        indices += np.cumsum(lows, dtype=np.int32)
    indices += np.arange(count, dtype=np.int32)
    return indices


def _pack_low(gaps: NDArray[np.uint32], shift: int) -> Bytes:
    """The lowest bits of each, least significant first, zeros to a whole byte."""
    bits = np.empty((len(gaps), shift), dtype=np.uint8)
    for bit in range(shift):
        bits[:, bit] = gaps >> np.uint32(bit) & np.uint32(1)
    return np.packbits(bits, bitorder="little")


def _unpack_low(low: Bytes, shift: int, count: int) -> NDArray[Any]:
    """The inverse; refuses padding that is not zero."""
    bits = np.unpackbits(low, bitorder="little")
    if bits[count * shift :].any():
        raise CorruptPayloadError("padding bits are not zero")
    lows: NDArray[Any] = np.zeros(count, dtype=np.uint8 if shift <= 8 else np.int32)
    for bit in range(shift)[::-1]:
        lows <<= 1
        lows |= bits[bit : count * shift : shift]
    return lows
