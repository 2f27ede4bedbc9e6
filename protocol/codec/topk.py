"""Chunked top-k: the largest coordinates of each chunk, few bits per value, packed indices.

A kept coordinate is sent as sign * level * scale: one scale per chunk (8 bits), and a table of
2^(bits-1) levels per payload, fitted to the magnitudes by Lloyd's iteration, because the magnitudes
above a threshold are far from uniform. The format does not fix how many coordinates of a chunk are
kept, so an encoder may distribute them freely.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.codec.errors import CorruptPayloadError, SizeMismatchError, UnknownCodecError
from protocol.codec.fixed import (
    FIXED_BITS,
    Float32s,
    Int32s,
    Int64s,
    Ints,
    scale_codes,
    scale_values,
)
from protocol.codec.gaps import MAX_SHIFT, gap_shift, most_gap_bytes, pack_gaps, unpack_gaps
from protocol.codec.sections import Bytes, Reader, Writer
from protocol.codec.selection import Source, largest_overall, largest_per_chunk
from protocol.codec.spec import VALUE_BITS, CodecId, CodecSpec

SCALE_MANTISSA_BITS = 4
SCALE_BITS = 8
MAX_SCALE_SHIFT = 17  # 31 * 2^14 * 2^17 * 65535 < 2^52: no payload can exceed the limit
TYPICAL_LEVEL = 256  # a chunk's scale is its mean kept magnitude / 256, so levels have 8 bits
LINEAR_STEP = 256  # of the implied levels 256, 512, ... 32768 for 8-bit values
_LEVEL_LIMIT = 65535
_FIT_SAMPLES = 16384
_FIT_ITERATIONS = 30

# Bits of a level's number on the wire, by value bits: a power of two, so that none straddles two
# bytes and zstd sees whole symbols.
_CHOICE_BITS = {1: 0, 2: 1, 4: 4, 8: 8}
_SUBHEADER = struct.Struct("<BBBII")


@dataclass(frozen=True)
class Coded:
    """Values as they are sent: sign * level * the chunk's scale.

    There are few distinct values, so most of the arithmetic is done once per distinct value.
    """

    levels: Int64s
    scales: Int64s
    per_chunk: Int64s  # number of values in each chunk
    choice: Bytes
    negative: NDArray[np.bool_]

    def values(self, of_quanta: Callable[[Int64s], Ints] = lambda quanta: quanta) -> Ints:
        """The values in quanta, with the elementwise function `of_quanta` applied."""
        count, negative = len(self.levels), self.negative.view(np.uint8)
        if 2 * count * len(self.scales) > len(self.choice):
            fixed = self.levels[self.choice] * np.repeat(self.scales, self.per_chunk)
            return of_quanta(np.where(self.negative, -fixed, fixed))
        signed = np.concatenate([self.levels, -self.levels])
        table = of_quanta((self.scales[:, None] * signed).reshape(-1))
        code = np.repeat(np.arange(0, len(table), 2 * count), self.per_chunk)
        code += self.choice + negative * np.uint8(count)  # below 256: 128 levels, two signs
        return table.take(code)


@dataclass(frozen=True)
class Sparse:
    """Kept coordinates: strictly increasing indices and their values."""

    indices: Int32s
    coded: Coded

    @property
    def fixed(self) -> Ints:
        """The values in quanta."""
        return self.coded.values()


def encode_topk(vector: Float32s | Source, spec: CodecSpec) -> tuple[bytes, Sparse]:
    """The payload, and exactly what a decoder gets from it."""
    if spec.overall:
        places, values = largest_overall(vector, spec.density)
    else:
        places, values = largest_per_chunk(vector, spec.block, spec.density)
    indices = places.astype(np.int32)
    magnitudes = np.abs(values).astype(np.float64)
    magnitudes *= 2.0**FIXED_BITS
    per_chunk = _per_chunk(indices, spec.block, vector.size)
    shift, codes = _chunk_scales(magnitudes, per_chunk, spec.value_bits)
    scales = scale_values(codes, SCALE_MANTISSA_BITS) << shift
    if not scales.all():
        kept = np.flatnonzero(np.repeat(scales, per_chunk))  # without chunks of scale 0
        indices, values, magnitudes = indices[kept], values[kept], magnitudes[kept]
        per_chunk = np.where(scales > 0, per_chunk, 0)
    magnitudes /= np.repeat(scales, per_chunk)
    levels = _fit_levels(magnitudes, spec.value_bits)
    choice = _nearest(levels, magnitudes)
    negative = np.signbit(values)

    gap_bits = gap_shift(vector.size, len(indices))
    gaps, low_bits = pack_gaps(indices, gap_bits)
    writer = Writer(CodecId.TOPK, spec.block, vector.size, zstd=spec.zstd)
    writer.fixed(_SUBHEADER.pack(spec.value_bits, shift, gap_bits, len(indices), len(gaps)))
    if spec.value_bits < 8:
        writer.fixed(levels.astype("<u2").tobytes())
    writer.section(codes.astype(np.uint8))
    writer.section(gaps)
    writer.section(low_bits)
    writer.section(np.packbits(negative, bitorder="little"))
    writer.section(_pack_choices(choice, _CHOICE_BITS[spec.value_bits]))
    return writer.finish(), Sparse(indices, Coded(levels, scales, per_chunk, choice, negative))


def decode_topk(reader: Reader, max_kept: int | None = None) -> Sparse:
    """Decode a payload; refuses everything that no encoder writes.

    With zstd a small payload can keep every coordinate, so memory is bounded by the number of
    coordinates, not by the payload: about 60 bytes per kept one. `max_kept` bounds it further.
    """
    size, chunk = reader.header.size, reader.header.block
    value_bits, shift, gap_bits, count, gaps = _SUBHEADER.unpack(reader.take(_SUBHEADER.size))
    if value_bits not in VALUE_BITS or shift > MAX_SCALE_SHIFT or gap_bits > MAX_SHIFT:
        raise UnknownCodecError(
            f"top-k with {value_bits} bits per value, shifts {shift} of scales, {gap_bits} of gaps"
        )
    if count > (size if max_kept is None else min(size, max_kept)):
        raise SizeMismatchError(f"{count} of {size} coordinates kept, {max_kept} allowed")
    if gaps > most_gap_bytes(size, count, gap_bits):
        raise SizeMismatchError(f"{gaps} bytes for {count} gaps in {size} coordinates")
    levels = _linear_levels()
    if value_bits < 8:
        levels = np.frombuffer(reader.take(1 << value_bits), dtype="<u2").astype(np.int64)
    codes = reader.section(-(-size // chunk))
    gap_data = reader.section(gaps)
    low_bits = reader.section(_bytes_for(count * gap_bits))
    negative = _unpack_choices(reader.section(_bytes_for(count)), count, 1)
    choice_bits = _CHOICE_BITS[value_bits]
    choice = _unpack_choices(reader.section(_bytes_for(count * choice_bits)), count, choice_bits)
    reader.finish()
    if choice.max(initial=0) >= len(levels):
        raise CorruptPayloadError(f"level {choice.max()} of {len(levels)}")

    indices = unpack_gaps(gap_data, low_bits, gap_bits, count, size)
    scales = scale_values(codes, SCALE_MANTISSA_BITS) << shift
    per_chunk = _per_chunk(indices, chunk, size)
    return Sparse(indices, Coded(levels, scales, per_chunk, choice, negative.view(np.bool_)))


def _per_chunk(indices: Int32s, chunk: int, size: int) -> Int64s:
    """Number of indices in each chunk."""
    chunks = -(-size // chunk)
    bounds = np.minimum(np.arange(1, chunks + 1) * chunk, size).astype(np.int32)
    return np.diff(np.searchsorted(indices, bounds), prepend=0)


def _chunk_scales(
    magnitudes: NDArray[np.float64], per_chunk: Int64s, value_bits: int
) -> tuple[int, Int64s]:
    """A common shift, and a scale code per chunk, from the mean magnitude (8 bits: the maximum)."""
    units, some = np.zeros(len(per_chunk)), per_chunk > 0
    starts = (np.cumsum(per_chunk) - per_chunk)[some]
    if value_bits == 8:
        units[some] = np.maximum.reduceat(magnitudes, starts) if len(starts) else 0.0
        units /= LINEAR_STEP * 128
    else:
        units[some] = np.add.reduceat(magnitudes, starts) / per_chunk[some] if len(starts) else 0.0
        units /= TYPICAL_LEVEL
    # The largest mantissa that a code can hold is 31 * 2^14; above it all scales are shifted.
    largest = float(units.max(initial=0.0)) / (31 << 14)
    shift = min(max(int(np.ceil(np.log2(largest))), 0), MAX_SCALE_SHIFT) if largest > 0 else 0
    units /= 2.0**shift
    return shift, scale_codes(units, SCALE_MANTISSA_BITS, SCALE_BITS, up=value_bits == 8)


def _linear_levels() -> Int64s:
    return np.arange(1, 129, dtype=np.int64) * LINEAR_STEP


def _fit_levels(ratios: NDArray[np.float64], value_bits: int) -> Int64s:
    """Levels of least squared error for these magnitudes, by Lloyd's iteration on a sample."""
    if value_bits == 8:
        return _linear_levels()
    number = 1 << (value_bits - 1)
    if not len(ratios):
        return np.full(number, TYPICAL_LEVEL, dtype=np.int64)
    sample = np.sort(ratios[:: -(-len(ratios) // _FIT_SAMPLES)])
    sums = np.concatenate([[0.0], np.cumsum(sample)])
    centres = np.quantile(sample, (np.arange(number) + 0.5) / number)
    edges = np.full(number + 1, len(sample))
    edges[0] = 0
    for _ in range(_FIT_ITERATIONS):
        edges[1:-1] = sample.searchsorted((centres[1:] + centres[:-1]) / 2)
        counts, upto = edges[1:] - edges[:-1], sums[edges]
        means = (upto[1:] - upto[:-1]) / np.maximum(counts, 1)
        moved = np.where(counts > 0, means, centres)
        if (moved == centres).all():
            break  # converged
        centres = moved
    return np.sort(np.clip(np.rint(centres), 1, _LEVEL_LIMIT).astype(np.int64))


def _nearest(levels: Int64s, ratios: NDArray[np.float64]) -> Bytes:
    """The index of the nearest level of each; in a tie the lower one."""
    edges = (levels[1:] + levels[:-1]) / 2
    if len(edges) == 1:
        upper: Bytes = (ratios > edges[0]).view(np.uint8)
        return upper
    return np.searchsorted(edges, ratios).astype(np.uint8)


def _bytes_for(bits: int) -> int:
    return (bits + 7) // 8


def _pack_choices(choices: Bytes, width: int) -> Bytes:
    """The low `width` bits of each, least significant first, padded with zeros to a whole byte."""
    if width == 8:
        return choices
    if width == 1:
        return np.packbits(choices, bitorder="little")
    bits = np.unpackbits(choices[:, None], axis=1, count=width, bitorder="little")
    return np.packbits(bits, bitorder="little")


def _unpack_choices(data: Bytes, count: int, width: int) -> Bytes:
    """The inverse of `_pack_choices`; refuses padding that is not zero."""
    if width == 0:
        return np.zeros(count, dtype=np.uint8)
    if width == 8:
        return data
    bits = np.unpackbits(data, bitorder="little")
    if bits[count * width :].any():
        raise CorruptPayloadError("padding bits are not zero")
    if width == 1:
        return bits[:count]
    grouped = np.packbits(bits[: count * width].reshape(count, width), axis=1, bitorder="little")
    return grouped.reshape(count)
