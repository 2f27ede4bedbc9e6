"""The codecs' test vectors, and a second decoder that was written from the spec alone."""

from __future__ import annotations

import json
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import zstandard

import protocol.codec as codec
from protocol.codec import decode, decode_fixed, encode
from tests.support.codec_updates import SPECS, update

VECTORS = Path(codec.__file__).parent.parent / "codec_vectors.json"


def vectors() -> list[dict[str, object]]:
    cases = json.loads(VECTORS.read_text())["cases"]
    assert isinstance(cases, list)
    return cases


@pytest.mark.parametrize("case", vectors(), ids=lambda case: str(case["name"]))
def test_vectors_in_both_directions(case: dict[str, object]) -> None:
    vector = np.frombuffer(bytes.fromhex(str(case["input_f32_le"])), dtype="<f4")
    payload = bytes.fromhex(str(case["payload"]))
    if case["encoder_exact"]:
        assert encode(vector, str(case["codec"])).data == payload
    indices, fixed = decode_fixed(payload, vector.size)
    assert (None if indices is None else indices.tolist()) == case["indices"]
    assert fixed.tolist() == case["fixed"]
    decoded = decode(payload, vector.size).values
    assert decoded.astype("<f4").tobytes().hex() == case["values_f32_le"]


def decode_by_the_spec(payload: bytes) -> tuple[list[int] | None, list[Fraction]]:
    """A second decoder, in plain Python from SPEC_CODECS.md; gives exact values, checks nothing."""
    _, codec_id, flags, log2_block, size = struct.unpack_from("<BBBBI", payload)
    block, offset, number = 1 << log2_block, 8, 0

    def take(count: int) -> bytes:
        nonlocal offset
        offset += count
        return payload[offset - count : offset]

    def section(raw_size: int) -> bytes:
        nonlocal number
        flagged, number = flags >> number & 1, number + 1
        if not flagged:
            return take(raw_size)
        return zstandard.decompress(take(int.from_bytes(take(4), "little")))

    def scale(code: int, m: int) -> int:
        return code if code < 1 << m else ((1 << m) + code % (1 << m)) << ((code >> m) - 1)

    if codec_id in (1, 2):
        width = {1: 4, 2: 2}[codec_id]
        if flags & 0x80:
            planes = [section(size) for _ in range(width)]
            raw = b"".join(bytes(t) for t in zip(*planes, strict=True))
        else:
            raw = section(width * size)
        words = [bytes(4 - width) + raw[width * i : width * (i + 1)] for i in range(size)]
        return None, [Fraction(struct.unpack("<f", word)[0]) for word in words]
    if codec_id in (3, 4):
        codes = section(2 * -(-size // block))
        scales = [8 * scale(c, 11) for (c,) in struct.iter_unpack("<H", codes)]
        if codec_id == 3:
            q = [b - 256 * (b > 127) for b in section(size)]
        else:
            q = [half - 8 for b in section((size + 1) // 2) for half in (b & 15, b >> 4)]
        return None, [Fraction(q[i] * scales[i // block], 2**40) for i in range(size)]

    bits, shift, gap_shift, kept, gap_bytes = struct.unpack("<BBBII", take(11))
    levels = [256 * (i + 1) for i in range(128)]
    if bits < 8:
        levels = [level for (level,) in struct.iter_unpack("<H", take(1 << bits))]
    scales = [scale(c, 4) << shift for c in section(-(-size // block))]
    gaps, upper = [], 0
    for byte in section(gap_bytes):
        upper += byte
        if byte < 255:
            gaps.append(upper << gap_shift)
            upper = 0
    low = int.from_bytes(section(-(-kept * gap_shift // 8)), "little")
    for i in range(kept):
        gaps[i] += low >> (i * gap_shift) & ((1 << gap_shift) - 1)
    signs = int.from_bytes(section(-(-kept // 8)), "little")
    width = {1: 0, 2: 1, 4: 4, 8: 8}[bits]
    chosen = int.from_bytes(section(-(-kept * width // 8)), "little")
    indices, values, index = [], [], -1
    for i in range(kept):
        index += gaps[i] + 1
        level = levels[chosen >> (i * width) & ((1 << width) - 1)]
        fixed = level * scales[index // block] * (-1 if signs >> i & 1 else 1)
        indices.append(index)
        values.append(Fraction(fixed, 2**40))
    assert offset == len(payload)
    return indices, values


@pytest.mark.parametrize(
    "text", [*SPECS, "topk:0.02:8", "topk:0.001:4:overall", "topk:0.1:2:overall"]
)
def test_a_second_decoder_written_from_the_spec_agrees(text: str) -> None:
    for size in (1, 33, 5001):
        payload = encode(update(size), text).data
        indices, values = decode_by_the_spec(payload)
        decoded = decode(payload, size)
        assert (None if decoded.indices is None else decoded.indices.tolist()) == indices
        assert [Fraction(float(v)) for v in decoded.values] == values


@pytest.mark.parametrize(
    "case", json.loads(VECTORS.read_text())["refused"], ids=lambda case: str(case["name"])
)
def test_vectors_of_refused_payloads(case: dict[str, object]) -> None:
    with pytest.raises(codec.CodecError) as caught:
        decode(bytes.fromhex(str(case["payload"])), int(str(case["expected_size"])))
    assert type(caught.value).__name__ == case["error"]
