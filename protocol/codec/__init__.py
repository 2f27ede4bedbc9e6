"""Tensor codecs: a flat float32 vector to self-describing bytes and back. See SPEC_CODECS.md.

    encoded = encode(update, "topk:0.02:2")     # a vector and a CodecSpec or its text form
    decoded = decode(data, expected_size)       # float32, sparse or dense
    indices, fixed = decode_fixed(data, size)   # the same in integers, for the aggregation

Decoded values are integer multiples of one quantum (see `fixed.py`), so that all replicas
aggregate to the same bits. For int8, int4 and top-k the two forms are exactly equal: value =
fixed * 2^-40. For fp32 and bf16 the floats are as sent and the integers are rounded.

Decoders accept untrusted bytes: sizes are compared with `expected_size` before anything is
allocated, and bytes that no encoder writes are refused with a `CodecError`.

Works on numpy arrays and CPU torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocol.codec import dense, topk
from protocol.codec.errors import (
    CodecError,
    CodecSpecError,
    CodecVersionError,
    CompressionError,
    CorruptPayloadError,
    NonFiniteError,
    SizeMismatchError,
    TrailingBytesError,
    TruncatedPayloadError,
    UnknownCodecError,
)
from protocol.codec.fixed import (
    FIXED_BITS,
    FIXED_LIMIT,
    QUANTUM,
    VALUE_LIMIT,
    Float32s,
    Int32s,
    Int64s,
    Ints,
    from_fixed,
    to_codec_fixed,
)
from protocol.codec.sections import CODEC_VERSION, MAX_SIZE, Header, Reader
from protocol.codec.selection import Source
from protocol.codec.spec import DEFAULT_CODEC, CodecId, CodecSpec

__all__ = [
    "CODEC_VERSION",
    "DEFAULT_CODEC",
    "FIXED_BITS",
    "FIXED_LIMIT",
    "MAX_SIZE",
    "QUANTUM",
    "VALUE_LIMIT",
    "CodecError",
    "CodecId",
    "CodecSpec",
    "CodecSpecError",
    "CodecVersionError",
    "CompressionError",
    "CorruptPayloadError",
    "Decoded",
    "Encoded",
    "Header",
    "NonFiniteError",
    "SizeMismatchError",
    "Source",
    "TrailingBytesError",
    "TruncatedPayloadError",
    "UnknownCodecError",
    "decode",
    "decode_fixed",
    "encode",
    "from_fixed",
    "read_header",
    "to_fixed",
]


@dataclass(frozen=True)
class Decoded:
    """A decoded vector. `indices` is None if it has all coordinates."""

    size: int
    indices: Int32s | None
    values: Float32s

    def dense(self) -> Float32s:
        """All coordinates."""
        if self.indices is None:
            return self.values
        full = np.zeros(self.size, dtype=np.float32)
        full[self.indices] = self.values
        return full


@dataclass(frozen=True)
class Encoded:
    """A payload; with top-k also what a receiver decodes from it."""

    data: bytes
    sparse: topk.Sparse | None = None


def encode(vector: Any, spec: CodecSpec | str = DEFAULT_CODEC) -> Encoded:
    """Encode a flat float32 vector (numpy or CPU torch). Refuses NaN and Inf, clips to limits.

    A `Source` is read in segments: top-k holds only the coordinates that it keeps.
    """
    if isinstance(spec, str):
        spec = CodecSpec.parse(spec)
    if isinstance(vector, Source) and spec.codec == CodecId.TOPK and 1 <= vector.size <= MAX_SIZE:
        data, sparse = topk.encode_topk(vector, spec)
        return Encoded(data, sparse)
    values = _as_float32(vector)
    if not 1 <= values.size <= MAX_SIZE:
        raise SizeMismatchError(f"{values.size} coordinates; 1 to {MAX_SIZE} can be encoded")
    if spec.codec == CodecId.TOPK:
        data, sparse = topk.encode_topk(values, spec)
        return Encoded(data, sparse)
    if spec.codec in (CodecId.INT8, CodecId.INT4):
        return Encoded(dense.encode_blocks(values, spec))
    return Encoded(dense.encode_floats(values, spec))


def read_header(data: bytes, expected_size: int) -> Header:
    """The checked header: codec, block and size. Nothing else is read."""
    return Reader(data, expected_size).header


def decode(data: bytes, expected_size: int, max_kept: int | None = None) -> Decoded:
    """Decode to float32. `max_kept` (see CodecSpec.max_kept) bounds a top-k's coordinates."""
    reader = Reader(data, expected_size)
    if reader.header.codec == CodecId.TOPK:
        sparse = topk.decode_topk(reader, max_kept)
        return Decoded(expected_size, sparse.indices, from_fixed(sparse.fixed))
    if reader.header.codec in (CodecId.INT8, CodecId.INT4):
        return Decoded(expected_size, None, dense.decode_blocks(reader))
    return Decoded(expected_size, None, dense.decode_floats(reader))


def decode_fixed(
    data: bytes,
    expected_size: int,
    max_kept: int | None = None,
    of_quanta: Callable[[Int64s], Ints] = lambda quanta: quanta,
) -> tuple[Int32s | None, Ints]:
    """Decode to (indices or None, int64 values in quanta of 2^-40, magnitude at most 2^52).

    `of_quanta`, an elementwise function, is applied to the values.
    """
    reader = Reader(data, expected_size)
    if reader.header.codec == CodecId.TOPK:
        sparse = topk.decode_topk(reader, max_kept)
        return sparse.indices, sparse.coded.values(of_quanta)
    if reader.header.codec in (CodecId.INT8, CodecId.INT4):
        return None, of_quanta(dense.decode_blocks_fixed(reader))
    return None, of_quanta(to_codec_fixed(dense.decode_floats(reader)))


def _as_float32(vector: Any) -> Float32s:
    """A flat, contiguous float32 array of a numpy array, a CPU torch tensor or a `Source`."""
    if isinstance(vector, Source):
        vector = vector.read(0, np.empty(vector.size, dtype=np.float32))
    if hasattr(vector, "detach"):
        vector = vector.detach().numpy()
    array = np.asarray(vector)
    if array.dtype != np.float32 or array.ndim != 1:
        raise TypeError(f"a flat float32 vector is needed, not {array.dtype} of {array.ndim} dims")
    return np.ascontiguousarray(array)
