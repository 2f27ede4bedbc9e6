"""The container of a payload: header, sections, zstd per section.

A payload is an 8-byte header and then sections whose raw sizes both sides can compute; a flag in
the header says for each section whether it is a zstd frame. Nothing is allocated before the
declared sizes have been compared with what the caller expects.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocol.codec.errors import (
    CodecVersionError,
    CompressionError,
    CorruptPayloadError,
    SizeMismatchError,
    TrailingBytesError,
    TruncatedPayloadError,
    UnknownCodecError,
)
from protocol.codec.spec import MAX_BLOCK, MIN_BLOCK, CodecId

CODEC_VERSION = 2
MAX_SIZE = 2**31 - 1  # coordinates in one payload
MAX_WINDOW_BYTES = 1 << 23  # of a zstd frame: what every decoder must offer (RFC 8878)
# The sections hold no repeated strings: only the entropy stage gains anything. Matches must be long
# (runs), since short accidental ones make the result larger and slower.
_ENTROPY_ONLY = zstandard.ZstdCompressionParameters(
    window_log=19,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
)

_HEADER = struct.Struct("<BBBBI")
_LENGTH = struct.Struct("<I")
_PLAIN = (CodecId.FP32, CodecId.BF16)
_SECTION_FLAGS = {
    CodecId.FP32: 0b1111,
    CodecId.BF16: 0b11,
    CodecId.INT8: 0b11,
    CodecId.INT4: 0b11,
    CodecId.TOPK: 0b11111,
}
FLAG_PLANES = 0x80  # fp32, bf16: one section per byte of the float instead of one section
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Header:
    """The first eight bytes of a payload."""

    codec: CodecId
    flags: int
    block: int
    size: int


class Writer:
    """Writes a payload; sets a section's flag if its zstd frame is smaller than the section."""

    def __init__(self, codec: CodecId, block: int, size: int, *, zstd: bool, flags: int = 0):
        if not 1 <= size <= MAX_SIZE:
            raise SizeMismatchError(f"a vector of {size} coordinates; 1 to {MAX_SIZE} can be sent")
        self._codec, self._block, self._size = codec, block, size
        self._flags, self._sections = flags, 0
        self._compressor = None
        if zstd:
            self._compressor = zstandard.ZstdCompressor(compression_params=_ENTROPY_ONLY)
        self._parts: list[Any] = []

    def fixed(self, data: bytes) -> None:
        """Append bytes that belong to no section."""
        self._parts.append(data)

    def section(self, data: Bytes) -> None:
        """Append the next section."""
        raw = memoryview(data.data)
        if self._compressor is not None and len(raw):
            frame = self._compressor.compress(raw)
            if len(frame) + _LENGTH.size < len(raw):
                self._flags |= 1 << self._sections
                self._parts += [_LENGTH.pack(len(frame)), frame]
                self._sections += 1
                return
        self._parts.append(raw)
        self._sections += 1

    def finish(self) -> bytes:
        log2_block = self._block.bit_length() - 1
        header = _HEADER.pack(CODEC_VERSION, self._codec, self._flags, log2_block, self._size)
        return b"".join([header, *self._parts])


class Reader:
    """Reads a payload front to back. Each read is checked against the bytes that are left."""

    def __init__(self, data: bytes, expected_size: int) -> None:
        self._data = memoryview(data)
        self._offset = 0
        self._next_section = 0
        self.header = self._read_header(expected_size)

    def _read_header(self, expected_size: int) -> Header:
        if len(self._data) and self._data[0] != CODEC_VERSION:
            raise CodecVersionError(f"codec version {self._data[0]}, not {CODEC_VERSION}")
        _, codec_byte, flags, log2_block, size = _HEADER.unpack(self.take(_HEADER.size))
        try:
            codec = CodecId(codec_byte)
        except ValueError as error:
            raise UnknownCodecError(f"codec id {codec_byte} is not known") from error
        if size != expected_size or not 1 <= size <= MAX_SIZE:
            raise SizeMismatchError(f"{size} coordinates declared, {expected_size} expected")
        block = 1 << log2_block if log2_block <= 16 else 0
        if not (block == 1 if codec in _PLAIN else MIN_BLOCK <= block <= MAX_BLOCK):
            raise UnknownCodecError(f"block of 2^{log2_block} coordinates in codec {codec.name}")
        planes = bool(flags & FLAG_PLANES) and codec in _PLAIN
        allowed = _SECTION_FLAGS[codec] | FLAG_PLANES if planes else _SECTION_FLAGS[codec]
        if codec in _PLAIN and not planes:
            allowed = 0b1
        if flags & ~allowed:
            raise CorruptPayloadError(f"reserved flag bits are set: {flags:#04x}")
        return Header(codec, flags, block, size)

    def take(self, size_bytes: int) -> memoryview:
        """The next bytes, without a copy."""
        end = self._offset + size_bytes
        if end > len(self._data):
            raise TruncatedPayloadError(f"{len(self._data)} bytes, at least {end} declared")
        part = self._data[self._offset : end]
        self._offset = end
        return part

    def section(self, raw_size_bytes: int) -> Bytes:
        """The next section, decompressed if it is flagged."""
        flagged = self.header.flags >> self._next_section & 1
        self._next_section += 1
        if not flagged:
            return np.frombuffer(self.take(raw_size_bytes), dtype=np.uint8)
        (frame_bytes,) = _LENGTH.unpack(self.take(_LENGTH.size))
        return np.frombuffer(_decompress(self.take(frame_bytes), raw_size_bytes), dtype=np.uint8)

    def finish(self) -> None:
        if self._offset != len(self._data):
            raise TrailingBytesError(f"{len(self._data) - self._offset} bytes after the payload")


def _decompress(frame: memoryview, raw_size_bytes: int) -> bytes:
    """Decompress a zstd frame. Raises `CompressionError` unless it declares exactly this size."""
    try:
        declared = zstandard.get_frame_parameters(frame)
        if declared.content_size != raw_size_bytes:
            raise CompressionError(
                f"zstd frame declares {declared.content_size} bytes, {raw_size_bytes} expected"
            )
        if declared.dict_id or declared.window_size > max(raw_size_bytes, MAX_WINDOW_BYTES):
            raise CompressionError("zstd frame asks for a dictionary or for too large a window")
        raw = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=raw_size_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CompressionError(f"damaged zstd frame: {error}") from error
    if len(raw) != raw_size_bytes:
        raise CompressionError(f"zstd frame holds {len(raw)} bytes, {raw_size_bytes} expected")
    return raw
