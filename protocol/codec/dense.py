"""Dense codecs: fp32, bf16, and blockwise int8 and int4 with one scale per block.

All passes work on segments that fit into a core's L2 cache, since memory bandwidth is the limit,
not arithmetic. A value is q * scale with q of at most 8 bits and a scale of 12 significant bits: a
float32 holds the product exactly, so it is the same on every CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.codec.errors import CorruptPayloadError, NonFiniteError
from protocol.codec.fixed import (
    FIXED_BITS,
    QUANTUM,
    VALUE_LIMIT,
    Float32s,
    Int64s,
    check_finite,
    check_in_range,
    scale_codes,
    scale_values,
)
from protocol.codec.sections import FLAG_PLANES, Bytes, Reader, Writer
from protocol.codec.spec import CodecId, CodecSpec

SCALE_MANTISSA_BITS = 11
SCALE_BITS = 16
SCALE_SHIFT = 3  # scales are in units of 8 quanta: 128 * the largest scale is within the limit
SEGMENT = 1 << 18  # coordinates; a multiple of every block size
_LARGEST_Q = {CodecId.INT8: 127, CodecId.INT4: 7}


def encode_floats(vector: Float32s, spec: CodecSpec) -> bytes:
    """fp32 as it is; bf16 rounded to nearest, ties to even. Clipped to the limit."""
    check_finite(vector)
    if vector.size and max(vector.max(), -vector.min()) > VALUE_LIMIT:
        vector = np.clip(vector, -VALUE_LIMIT, VALUE_LIMIT)
    words: NDArray[Any] = vector.astype("<f4", copy=False)
    if spec.codec == CodecId.BF16:
        words = _round_to_bf16(vector)
    flags = FLAG_PLANES if spec.zstd else 0
    writer = Writer(spec.codec, 1, vector.size, zstd=spec.zstd, flags=flags)
    if spec.zstd:  # one section per byte: exponents compress only beside other exponents
        planes = words.view(np.uint8).reshape(vector.size, words.itemsize)
        for plane in range(words.itemsize):
            writer.section(np.ascontiguousarray(planes[:, plane]))
    else:
        writer.section(words.view(np.uint8))
    return writer.finish()


def decode_floats(reader: Reader) -> Float32s:
    """The floats as sent."""
    size, width = reader.header.size, 4 if reader.header.codec == CodecId.FP32 else 2
    if reader.header.flags & FLAG_PLANES:
        raw = np.empty((size, width), dtype=np.uint8)
        for plane in range(width):
            raw[:, plane] = reader.section(size)
    else:
        raw = reader.section(size * width)
    reader.finish()
    if width == 4:
        values = np.array(raw.reshape(-1).view("<f4"), dtype=np.float32)
    else:
        wide = raw.reshape(-1).view("<u2").astype(np.uint32)
        wide <<= 16
        values = wide.view(np.float32)
    check_in_range(values)
    return values


def _round_to_bf16(vector: Float32s) -> NDArray[np.uint16]:
    """Round to the upper 16 bits of each float, ties to even."""
    out = np.empty(vector.size, dtype="<u2")
    for start in range(0, vector.size, SEGMENT):
        bits = vector[start : start + SEGMENT].view(np.uint32)
        odd = (bits >> 16) & 1
        out[start : start + SEGMENT] = (bits + np.uint32(0x7FFF) + odd) >> 16
    return out


def encode_blocks(vector: Float32s, spec: CodecSpec) -> bytes:
    """int8, int4: each block divided by its own scale and rounded to nearest."""
    largest_q, size, block = _LARGEST_Q[spec.codec], vector.size, spec.block
    padded_size = -(-size // block) * block
    q = np.empty(padded_size, dtype=np.int8)
    codes = np.empty(padded_size // block, dtype="<u2")
    scratch = np.empty(min(SEGMENT, padded_size), dtype=np.float32)
    for start in range(0, size, SEGMENT):
        part = vector[start : start + SEGMENT]
        if part.size % block:  # only the last segment: pad with zeros, which change no maximum
            part = np.concatenate([part, np.zeros(-part.size % block, dtype=np.float32)])
        rows, buffer = part.reshape(-1, block), scratch[: part.size].reshape(-1, block)
        first = start // block
        codes[first : first + len(rows)] = segment_codes = _block_scales(rows, buffer, largest_q)
        _quantise(rows, segment_codes, largest_q, buffer)
        # The cast is exact: whole numbers in -127..127.
        np.copyto(q[start : start + part.size].reshape(-1, block), buffer, casting="unsafe")
    writer = Writer(spec.codec, block, size, zstd=spec.zstd)
    writer.section(codes.view(np.uint8))
    writer.section(q[:size].view(np.uint8) if largest_q == 127 else _pack_nibbles(q[:size]))
    return writer.finish()


def _block_scales(rows: Float32s, buffer: Float32s, largest_q: int) -> Int64s:
    """The smallest scale code of each block with which its largest magnitude is not clipped."""
    np.abs(rows, out=buffer)
    absmax = buffer.max(axis=1).astype(np.float64)
    if not absmax.max() < np.inf:
        raise NonFiniteError("the vector contains NaN or Inf")
    units = absmax * (2.0 ** (FIXED_BITS - SCALE_SHIFT) / largest_q)
    return scale_codes(units, SCALE_MANTISSA_BITS, SCALE_BITS, up=True)


def _quantise(rows: Float32s, codes: Int64s, largest_q: int, buffer: Float32s) -> None:
    scales = _scales_in_quanta(codes).astype(np.float32) * np.float32(QUANTUM)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    np.multiply(rows, inverse[:, None], out=buffer)
    if codes.max(initial=0) == (1 << SCALE_BITS) - 1:  # a saturated scale
        np.clip(buffer, -largest_q, largest_q, out=buffer)
    np.rint(buffer, out=buffer)


def decode_blocks(reader: Reader) -> Float32s:
    """int8, int4 as float32: exact products."""
    scales, q = _read_blocks(reader)
    scales_f32 = scales.astype(np.float32) * np.float32(QUANTUM)
    values = np.empty(q.size, dtype=np.float32)
    _multiply_blocks(q, scales_f32, reader.header.block, values)
    return values


def decode_blocks_fixed(reader: Reader) -> Int64s:
    """int8, int4 in quanta."""
    scales, q = _read_blocks(reader)
    fixed = np.empty(q.size, dtype=np.int64)
    _multiply_blocks(q, scales, reader.header.block, fixed)
    return fixed


def _read_blocks(reader: Reader) -> tuple[Int64s, NDArray[np.int8]]:
    size, block = reader.header.size, reader.header.block
    codes = reader.section(2 * -(-size // block)).view("<u2")
    if reader.header.codec == CodecId.INT8:
        q = reader.section(size).view(np.int8)
    else:
        q = _unpack_nibbles(reader.section((size + 1) // 2), size)
    reader.finish()
    return _scales_in_quanta(codes), q


def _scales_in_quanta(codes: NDArray[Any]) -> Int64s:
    return scale_values(codes, SCALE_MANTISSA_BITS) << SCALE_SHIFT


def _multiply_blocks(
    q: NDArray[np.int8], scales: NDArray[Any], block: int, out: NDArray[Any]
) -> None:
    for start in range(0, q.size, SEGMENT):
        stop = min(start + SEGMENT, q.size // block * block)
        if start < stop:
            rows = out[start:stop].reshape(-1, block)
            np.copyto(rows, q[start:stop].reshape(-1, block))
            np.multiply(rows, scales[start // block : stop // block, None], out=rows)
    tail = q.size // block * block
    if tail < q.size:
        out[tail:] = q[tail:].astype(out.dtype) * scales[-1]


def _pack_nibbles(q: NDArray[np.int8]) -> Bytes:
    """q + 8 in four bits, two per byte, the first in the low half; a missing second is 0."""
    size_bytes = (q.size + 1) // 2
    pairs = np.zeros(2 * size_bytes, dtype=np.uint8)
    np.add(q, 8, out=pairs[: q.size], casting="unsafe")
    wide = pairs.view("<u2")  # low byte: first of the pair; contiguous, so it vectorises
    packed: Bytes = ((wide >> 4) | wide).astype(np.uint8)
    return packed


def _unpack_nibbles(data: Bytes, size: int) -> NDArray[np.int8]:
    if size % 2 and data[-1] >> 4:
        raise CorruptPayloadError("padding bits are not zero")
    wide = data.astype("<u2")
    wide |= wide << 4
    wide &= 0x0F0F
    q = wide.view(np.int8)[:size]
    q -= 8
    return q
