"""Increasing indices coded as gaps of one byte each, for zstd; a cumulative sum decodes them.

The lowest `shift` bits of each gap are noise and are stored raw; `shift` is chosen so that the rest
mostly fits into a byte. At the density of an ordinary update (2 %) it is 0, and the byte is the
gap. A longer gap has bytes of 255 before its own, each of which adds 255. zstd's Huffman stage then
adapts to the actual gaps: for independent coordinates the result is within 1 % of the entropy, and
the clustered updates of real models take fewer bits than any code fitted to the density alone.
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
_TYPICAL_BITS = 6  # of a gap without its low bits: below 8, so that escapes are rare


def gap_shift(size: int, count: int) -> int:
    """How many low bits of a gap are stored raw, where `count` of `size` coordinates are kept."""
    return max((size // max(count, 1)).bit_length() - _TYPICAL_BITS, 0)


def most_gap_bytes(size: int, count: int, shift: int) -> int:
    """Upper bound of the gaps' bytes: all escapes together add up to less than `size`."""
    return count + size // (ESCAPE << shift)


def pack_gaps(indices: Ints, shift: int) -> tuple[Bytes, Bytes]:
    """(a byte per gap with the escapes before it, low bits)."""
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
    """The indices: strictly increasing by construction, checked to be below `size`."""
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
    """The lowest bits of each gap, least significant first, padded with zeros to a whole byte."""
    bits = np.empty((len(gaps), shift), dtype=np.uint8)
    for bit in range(shift):
        bits[:, bit] = gaps >> np.uint32(bit) & np.uint32(1)
    return np.packbits(bits, bitorder="little")


def _unpack_low(low: Bytes, shift: int, count: int) -> NDArray[Any]:
    """The inverse of `_pack_low`; refuses padding that is not zero."""
    bits = np.unpackbits(low, bitorder="little")
    if bits[count * shift :].any():
        raise CorruptPayloadError("padding bits are not zero")
    lows: NDArray[Any] = np.zeros(count, dtype=np.uint8 if shift <= 8 else np.int32)
    for bit in range(shift)[::-1]:
        lows <<= 1
        lows |= bits[bit : count * shift : shift]
    return lows
