"""Codecs and bytes from strangers: what is refused, before anything is allocated for it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import protocol.codec as codec
from protocol.codec import CodecSpec, decode, decode_fixed, encode
from tests.support.codec_updates import SPECS, update


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("text", SPECS)
def test_encoders_refuse_nan_and_inf_anywhere(text: str, bad: float) -> None:
    for size, position in ((1, 0), (9000, 4096), (9000, 8999), (200_000, 131_073)):
        vector = update(size)
        vector[position] = bad
        with pytest.raises(codec.NonFiniteError):
            encode(vector, text)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 4097.0])
def test_decoders_refuse_nan_inf_and_too_large(bad: float) -> None:
    for text, dtype in (("fp32", "<f4"), ("bf16", "<u2")):
        payload = bytearray(encode(np.zeros(5, dtype=np.float32), text).data)
        raw = np.array([bad], dtype="<f4").tobytes()
        payload[-4 if dtype == "<f4" else -2 :] = raw if dtype == "<f4" else raw[2:]
        if bad == 4097.0 and text == "bf16":
            continue  # not a bf16 number: rounds to 4096
        with pytest.raises(codec.NonFiniteError):
            decode(bytes(payload), 5)


def test_wrong_shapes_and_types_are_refused_by_the_encoder() -> None:
    with pytest.raises(TypeError):
        encode(np.zeros(4))
    with pytest.raises(TypeError):
        encode(np.zeros((2, 2), dtype=np.float32))
    with pytest.raises(codec.SizeMismatchError):
        encode(np.zeros(0, dtype=np.float32))


@pytest.mark.parametrize("text", SPECS)
def test_truncation_and_trailing_bytes_are_refused(text: str) -> None:
    data = encode(update(300), text).data
    for length in range(len(data)):
        with pytest.raises(codec.TruncatedPayloadError):
            decode(data[:length], 300)
    with pytest.raises(codec.TrailingBytesError):
        decode(data + b"\0", 300)


def test_another_size_version_and_codec_are_distinct_errors() -> None:
    data = bytearray(encode(update(300), "int8").data)
    for size in (299, 301, 0, -1, 2**40):
        with pytest.raises(codec.SizeMismatchError):
            decode(bytes(data), size)
    with pytest.raises(codec.CodecVersionError):
        decode(b"\x01" + data[1:], 300)
    with pytest.raises(codec.UnknownCodecError):
        decode(data[:1] + b"\x09" + data[2:], 300)
    with pytest.raises(codec.CorruptPayloadError):
        decode(data[:2] + b"\x40" + data[3:], 300)


def test_a_top_k_that_keeps_more_than_allowed_is_refused() -> None:
    spec = CodecSpec.parse("topk:0.01:2")
    greedy = encode(update(9000), "topk:0.5:2").data
    with pytest.raises(codec.SizeMismatchError):
        decode_fixed(greedy, 9000, max_kept=spec.max_kept(9000))
    honest = encode(update(9000), spec).data
    assert decode_fixed(honest, 9000, max_kept=spec.max_kept(9000))[1].size == 90


def bombs() -> dict[str, bytes]:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    undeclared = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    honest = zstandard.ZstdCompressor().compress(bytes(1000))
    lying = bytearray(honest)
    at = 5 + (not honest[4] & 0x20)
    lying[at : at + 2] = (1 << 16).to_bytes(3, "little")[:2]
    return {
        "too large": bomb,
        "no size": undeclared,
        "lying size": bytes(lying),
        "two frames": honest + honest,
        "skippable": b"\x50\x2a\x4d\x18" + (1000).to_bytes(4, "little") + bytes(1000),
        "noise": bytes(range(200)),
        "empty": b"",
    }


@pytest.mark.parametrize("name", bombs())
def test_zstd_bombs_are_refused_without_allocating(name: str) -> None:
    frame = bombs()[name]
    # int8, 1000 coordinates in blocks of 16: scales raw, values as a zstd frame.
    header = bytes([2, 3, 0b10, 4]) + (1000).to_bytes(4, "little") + bytes(2 * 63)
    payload = header + len(frame).to_bytes(4, "little") + frame
    tracemalloc.start()
    with pytest.raises(codec.CompressionError):
        decode(payload, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_declared_counts_are_checked_before_allocation() -> None:
    size = 2**31 - 1
    counts = size.to_bytes(4, "little") * 2
    header = bytes([2, 5, 0, 12]) + size.to_bytes(4, "little") + bytes([1, 0, 0]) + counts
    tracemalloc.start()
    with pytest.raises(codec.TruncatedPayloadError):
        decode(header + bytes(100), size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16


def test_escapes_are_bounded_by_the_size_before_they_are_unpacked() -> None:
    """A few bytes of zstd could be gigabytes of escapes, which lead nowhere."""
    size = 255 * 4
    for escapes, kept, error in (
        (4, 1, codec.CorruptPayloadError),  # there is room, but no coordinate is so far
        (5, 1, codec.SizeMismatchError),
        (1 << 31, 1, codec.SizeMismatchError),
        (4, 0, codec.CorruptPayloadError),
    ):
        counts = kept.to_bytes(4, "little") + (escapes + kept).to_bytes(4, "little")
        header = bytes([2, 5, 0, 12]) + size.to_bytes(4, "little") + bytes([1, 0, 0]) + counts
        gaps = b"\xff" * min(escapes, 8) + bytes(kept)
        with pytest.raises(error):
            decode(header + bytes([0, 1, 31]) + gaps + bytes(kept), size)


@settings(deadline=None, max_examples=300)
@given(gaps=st.binary(min_size=1, max_size=40), shift=st.integers(0, 26), size=st.integers(1, 5000))
def test_gap_bytes_are_refused_or_mean_what_they_say(gaps: bytes, shift: int, size: int) -> None:
    kept = sum(byte < 255 for byte in gaps)
    low = bytes(-(-kept * shift // 8))
    counts = kept.to_bytes(4, "little") + len(gaps).to_bytes(4, "little")
    header = bytes([2, 5, 0, 16]) + size.to_bytes(4, "little") + bytes([1, 0, shift]) + counts
    payload = header + bytes([0, 1, 31]) + gaps + low + bytes(-(-kept // 8))
    wanted, at = [], -1
    for byte in gaps:
        at += (byte << shift) + (byte < 255)
        wanted += [at] * (byte < 255)
    if shift > 25 or gaps[-1] == 255 or at >= size:
        with pytest.raises(codec.CodecError):
            decode(payload, size)
    else:
        indices = decode(payload, size).indices
        assert indices is not None
        assert indices.tolist() == wanted


def refuse_or_decode(data: bytes, size: int) -> None:
    """The whole promise to a caller: a CodecError, or a vector that keeps every rule."""
    try:
        indices, fixed = decode_fixed(data, size)
    except codec.CodecError:
        with pytest.raises(codec.CodecError):
            decode(data, size)
        return
    decoded = decode(data, size)
    assert np.isfinite(decoded.values).all()
    assert np.abs(fixed).max(initial=0) <= codec.FIXED_LIMIT
    assert np.array_equal(codec.to_codec_fixed(decoded.values), fixed)
    if indices is None:
        assert fixed.shape == (size,)
    else:
        assert indices.shape == fixed.shape
        assert (np.diff(indices) > 0).all()
        assert not len(indices) or (indices[0] >= 0 and indices[-1] < size)


@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=200), size=st.integers(1, 300))
def test_arbitrary_bytes_never_crash(data: bytes, size: int) -> None:
    refuse_or_decode(data, size)


@settings(deadline=None, max_examples=300)
@given(body=st.binary(max_size=200), codec_id=st.integers(1, 5), flags=st.integers(0, 31))
def test_arbitrary_bodies_behind_a_valid_header_never_crash(
    body: bytes, codec_id: int, flags: int
) -> None:
    header = bytes([2, codec_id, flags, 0 if codec_id < 3 else 4]) + (40).to_bytes(4, "little")
    refuse_or_decode(header + body, 40)


def fuzz(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    size = 700
    originals = [encode(update(size, 1), text).data for text in SPECS]
    for _ in range(count):
        data = bytearray(originals[random.integers(len(originals))])
        for _ in range(random.integers(1, 4)):
            at = int(random.integers(min(len(data), 64 if random.random() < 0.5 else len(data))))
            kind = random.integers(5)
            if kind == 0:
                data[at] ^= 1 << int(random.integers(8))
            elif kind == 1:
                data[at] = int(random.integers(256))
            elif kind == 2:
                data[at:at] = random.bytes(int(random.integers(1, 9)))
            elif kind == 3 and len(data) > 20:
                del data[at : at + int(random.integers(1, 9))]
            else:
                data[at] = int(random.choice([0, 1, 127, 128, 255]))
        refuse_or_decode(bytes(data), size)


def test_mutated_payloads() -> None:
    fuzz(2000, seed=0)


@pytest.mark.long
def test_a_hundred_thousand_mutated_payloads() -> None:
    fuzz(100_000, seed=1)
