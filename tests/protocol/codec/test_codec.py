"""Codecs: round trips, error bounds, what is selected, fixed point, the text form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import protocol.codec as codec
from protocol.codec import CodecSpec, CodecSpecError, decode, decode_fixed, encode
from protocol.codec.fixed import scale_codes, scale_values
from protocol.codec.gaps import most_gap_bytes, pack_gaps, unpack_gaps
from protocol.codec.selection import largest_overall, largest_per_chunk
from tests.support.codec_updates import SPECS, update

SIZES = [1, 2, 15, 16, 17, 255, 256, 4095, 4096, 4097, 70_001]


def relative_error(decoded: np.ndarray, vector: np.ndarray) -> float:
    return float(np.linalg.norm(decoded - vector) / np.linalg.norm(vector))


# Round trips


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("size", SIZES)
def test_round_trip_of_every_codec_at_awkward_sizes(text: str, size: int) -> None:
    vector = update(size)
    encoded = encode(vector, text)
    decoded = decode(encoded.data, size)
    indices, fixed = decode_fixed(encoded.data, size)
    assert len(encoded.data) <= CodecSpec.parse(text).max_bytes(size)
    assert decoded.dense().shape == vector.shape
    assert decoded.dense().dtype == np.float32
    assert fixed.dtype == np.int64
    assert np.abs(fixed).max() <= codec.FIXED_LIMIT
    assert np.array_equal(fixed, codec.to_codec_fixed(decoded.values))
    if not text.startswith(("fp32", "bf16")):
        # The float is the integer times the quantum, with no rounding at all.
        assert np.array_equal(fixed.astype(np.float64) * codec.QUANTUM, decoded.values)
    if indices is None:
        assert decoded.indices is None
    else:
        assert np.array_equal(indices, decoded.indices)
        assert (np.diff(indices) > 0).all()
        assert len(indices) <= CodecSpec.parse(text).max_kept(size)
    assert relative_error(decoded.dense(), vector) < 1.0


def test_torch_tensors_and_numpy_arrays_encode_alike() -> None:
    vector = update(5000)
    tensor = torch.from_numpy(vector.copy()).requires_grad_()
    for text in SPECS:
        assert encode(tensor, text).data == encode(vector, text).data


def test_input_is_not_changed() -> None:
    vector = update(5000)
    vector.setflags(write=False)
    for text in SPECS:
        encode(vector, text)


@pytest.mark.parametrize("text", SPECS)
def test_zeros_decode_to_zeros(text: str) -> None:
    vector = np.zeros(5000, dtype=np.float32)
    assert not decode(encode(vector, text).data, 5000).dense().any()


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize(("text", "block", "largest"), [("int8", 256, 127), ("int4", 64, 7)])
def test_integer_scales_cost_no_accuracy(text: str, block: int, largest: int, scale: float) -> None:
    vector = update(256 * 200, scale=scale)
    rows = vector.reshape(-1, block).astype(np.float64)
    steps = np.abs(rows).max(axis=1, keepdims=True) / largest
    plain = relative_error((np.rint(rows / steps) * steps).ravel(), vector)
    ours = relative_error(decode(encode(vector, text).data, vector.size).dense(), vector)
    assert ours <= 1.002 * plain


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_more_bits_per_value_give_less_error(scale: float) -> None:
    vector = update(50_000, scale=scale)
    errors = [
        relative_error(decode(encode(vector, text).data, vector.size).dense(), vector)
        for text in ("topk:1:1", "topk:1:2", "topk:1:4", "topk:1:8:16", "bf16", "fp32")
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0.0
    assert errors[-2] < 0.003
    assert errors[-3] < 0.02


def test_top_k_moves_at_most_a_hundredth_of_fp32() -> None:
    vector = update(459_392)
    for text in ("topk:0.01:4", "topk:0.02:4", "topk:0.02:2", "topk:0.02:1"):
        assert vector.nbytes / len(encode(vector, text).data) >= 100, text


def test_index_bits_are_within_two_percent_of_the_entropy_bound() -> None:
    vector = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
    for density in (0.01, 0.02, 0.05):
        encoded = encode(vector, f"topk:{density}:1")
        kept = len(decode(encoded.data, vector.size).values)
        chunks = -(-vector.size // 4096)
        index_bits = 8 * (len(encoded.data) - chunks) / kept - 1
        rate = kept / vector.size
        bound = -np.log2(rate) - (1 - rate) / rate * np.log2(1 - rate)
        assert index_bits < 1.02 * bound


@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(st.one_of(st.integers(1, 600), st.integers(1, 10**6)), max_size=60),
    shift=st.integers(0, 25),
    room=st.integers(1, 10**6),
)
def test_gaps_survive_with_any_shift(steps: list[int], shift: int, room: int) -> None:
    indices = np.cumsum(np.array(steps, dtype=np.int64)) - 1
    size = int(indices[-1]) + room if len(indices) else room
    data, low = pack_gaps(indices, shift)
    assert len(data) <= most_gap_bytes(size, len(indices), shift)
    assert np.array_equal(unpack_gaps(data, low, shift, len(indices), size), indices)
    if len(indices):
        with pytest.raises(codec.CorruptPayloadError):
            unpack_gaps(data, low, shift, len(indices), int(indices[-1]))


# Selection


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 9000),
    chunk=st.sampled_from([16, 64, 1024, 4096]),
    density=st.floats(0.001, 1.0),
    seed=st.integers(0, 1000),
    ties=st.booleans(),
)
def test_selection_is_exact(size: int, chunk: int, density: float, seed: int, ties: bool) -> None:
    vector = update(size, seed, scale=1.0)
    if ties:
        vector = np.rint(vector)
    magnitudes = np.abs(vector)

    def reference(start: int, stop: int) -> list[int]:
        keep = min(stop - start, max(1, round(density * (stop - start))))
        order = np.argsort(-magnitudes[start:stop], kind="stable")[:keep] + start
        return sorted(int(i) for i in order if magnitudes[i] > 0)

    per_chunk = [i for s in range(0, size, chunk) for i in reference(s, min(s + chunk, size))]
    for (indices, values), wanted in (
        (largest_per_chunk(vector, chunk, density), per_chunk),
        (largest_overall(vector, density), reference(0, size)),
    ):
        assert indices.tolist() == wanted
        assert np.array_equal(values, vector[indices])


def test_selection_survives_a_sample_that_misleads() -> None:
    vector = np.ones(3 * 4096, dtype=np.float32)
    vector[::8] = 100.0  # the sampled positions are all larger than the rest
    vector[5::61] = 7.0
    for indices, _ in (largest_per_chunk(vector, 4096, 0.3), largest_overall(vector, 0.3)):
        assert len(indices) == pytest.approx(0.3 * vector.size, rel=0.001)
        assert set(np.flatnonzero(vector == 100.0)) <= set(indices.tolist())


# Fixed point


@settings(deadline=None)
@given(st.lists(st.floats(-(2.0**13), 2.0**13, width=32), min_size=1))
def test_to_fixed_rounds_to_even_and_clips(values: list[float]) -> None:
    fixed = codec.to_codec_fixed(np.array(values, dtype=np.float32))
    # Python's round is exact on the exact product and takes ties to even.
    limit = codec.FIXED_LIMIT
    assert fixed.tolist() == [max(-limit, min(limit, round(v * 2**40))) for v in values]


def test_from_fixed_rounds_once_to_even() -> None:
    fixed = np.array([2**24 + 1, 2**24 + 3, -(2**24 + 1), 2**52, 2**60 + 2**36 + 1])
    expected = [2**24, 2**24 + 4, -(2**24), 2**52, 2**60 + 2**37]
    assert (codec.from_fixed(fixed).astype(np.float64) * 2**40).tolist() == expected


@pytest.mark.parametrize(("mantissa_bits", "code_bits"), [(11, 16), (4, 8)])
def test_every_scale_code_is_distinct_ordered_and_its_own_encoding(
    mantissa_bits: int, code_bits: int
) -> None:
    codes = np.arange(1 << code_bits)
    values = scale_values(codes, mantissa_bits)
    assert (np.diff(values) > 0).all()
    for up in (True, False):
        again = scale_codes(values.astype(np.float64), mantissa_bits, code_bits, up=up)
        assert np.array_equal(again, codes)
    between = values[:-1] + 0.25
    assert np.array_equal(scale_codes(between, mantissa_bits, code_bits, up=True), codes[1:])


@pytest.mark.parametrize("text", ["int8", "int4", "topk:1:8:16", "topk:1:4", "fp32", "bf16"])
def test_values_beyond_the_limit_are_clipped_by_the_encoder(text: str) -> None:
    vector = np.array([3e38, -3e38, 1.0, 0.0] * 8, dtype=np.float32)
    values = decode(encode(vector, text).data, vector.size).dense()
    assert 8 < values[0] <= codec.VALUE_LIMIT
    assert values[1] == -values[0]


# The text form


@pytest.mark.parametrize("text", [*SPECS, codec.DEFAULT_CODEC, "topk:0.02:2:16384"])
def test_text_form_survives(text: str) -> None:
    spec = CodecSpec.parse(text)
    assert str(spec) == text
    assert CodecSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fp64",
        "INT8",
        "fp32:4",
        "int8:0",
        "int8:100",
        "int8:x",
        "int8:131072",
        "int8+gzip",
        "int8:64:64",
        "topk",
        "topk:0.01",
        "topk:0:4",
        "topk:nan:4",
        "topk:1.5:4",
        "topk:0.01:3",
        "topk:0.01:4:7",
        "topk:0.01:4:all",
        "topk:0.01:4:4096:1",
    ],
)
def test_bad_text_is_a_usage_error_with_a_message(text: str) -> None:
    with pytest.raises(CodecSpecError) as caught:
        CodecSpec.parse(text)
    assert caught.value.message
