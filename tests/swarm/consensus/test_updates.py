"""Updates on the wire: receivers and followers of the log get the very bits of the sender."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import CodecSpec, NonFiniteError, SizeMismatchError, encode
from protocol.digests import weights_digest
from protocol.errors import WireError
from protocol.frames import content_digest
from protocol.identity import Identity
from protocol.limits import SHARD_BYTES
from protocol.log import Contribution, Entry, LogError, pack_log, unpack_log
from protocol.packing import Malformed
from protocol.updates import UpdateError, WrongBlock, WrongRound, WrongSender, update_digest
from swarm.consensus.aggregate import aggregate
from swarm.consensus.fixed_point import VALUE_LIMIT, FixedUpdate, Ints, checked
from swarm.consensus.sums import apply_step
from swarm.consensus.updates import (
    OtherCodec,
    UpdateCodec,
    UpdateOversize,
    from_shards,
    replay,
    shards_of,
    snapshot_index,
)
from tests.support.fixed_updates import same

PEERS = [Identity(bytes([i + 1]) * 32) for i in range(8)]
ME, OTHER = PEERS[0].peer_id, PEERS[1].peer_id
RUN, BLOCK, ROUND = b"r" * 32, 3, 17
CODECS = ["topk:0.05:2", "topk:0.1:4:64", "topk:0.02:8:overall", "topk:1.0:1:16"]
CODECS += ["int8", "int8+zstd", "int4", "bf16", "fp32", "fp32+zstd"]
HEADER = struct.Struct(">HQ38s")


def vector(seed: int, size: int, spread: int = 1 << 16) -> Ints:
    numbers = np.random.default_rng(seed)
    return np.rint(numbers.normal(size=size) * spread).astype(np.int64)


# --- encoding


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1, 37, 5000])
def test_the_sender_knows_what_receivers_decode(codec: str, size: int) -> None:
    updates = UpdateCodec(codec, size)
    payload, mine = updates.encode(vector(1, size), BLOCK, ROUND, ME)
    theirs = UpdateCodec(CodecSpec.parse(codec), size).decode(payload, BLOCK, ROUND, ME)
    assert same(theirs, mine)
    assert mine.values.dtype == np.int32
    assert len(payload) <= updates.max_bytes_at(ROUND)
    assert update_digest(payload) == content_digest(payload)
    checked(mine, size)


def test_fp32_updates_lose_nothing_that_a_float_holds() -> None:
    quanta = vector(2, 1000)  # under 24 bits
    _, update = UpdateCodec("fp32", 1000).encode(quanta, BLOCK, ROUND, ME)
    assert np.array_equal(update.dense(), quanta)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CODECS), st.integers(1, 700), st.integers(0, 2**32), st.integers(0, 40))
def test_any_update_can_be_sent(codec: str, size: int, seed: int, bits: int) -> None:
    quanta = vector(seed, size, 1 << bits)
    payload, update = UpdateCodec(codec, size).encode(quanta, 0, 0, ME)
    assert same(UpdateCodec(codec, size).decode(payload, 0, 0, ME), update)


@pytest.mark.parametrize(
    ("codec_quanta", "expected"),
    [
        (2**15, 1),  # a half, away from zero
        (-(2**15), -1),
        (2**15 - 1, 0),
        (-(2**15) + 1, 0),
        (3 * 2**15, 2),
        (-3 * 2**15, -2),
        (2**52, VALUE_LIMIT - 1),  # 4096, clipped to under 128
        (-(2**52), -(VALUE_LIMIT - 1)),
        (0, 0),
    ],
)
def test_rounding_to_the_grid_of_the_consensus(codec_quanta: int, expected: int) -> None:
    value = np.array([codec_quanta * 2.0**-40], dtype=np.float32)
    payload = HEADER.pack(BLOCK, ROUND, ME) + encode(value, "fp32").data
    assert UpdateCodec("fp32", 1).decode(payload, BLOCK, ROUND, ME).values.tolist() == [expected]


# --- refusing

GOOD, _ = UpdateCodec("topk:0.1:2", 500).encode(vector(3, 500), BLOCK, ROUND, ME)


@pytest.mark.parametrize(
    ("block", "round_", "sender", "error"),
    [
        (BLOCK + 1, ROUND, ME, WrongBlock),
        (BLOCK, ROUND + 1, ME, WrongRound),  # a replay
        (BLOCK, ROUND, OTHER, WrongSender),  # plagiarism
    ],
)
def test_updates_that_were_made_for_something_else(
    block: int, round_: int, sender: bytes, error: type[UpdateError]
) -> None:
    codec = UpdateCodec("topk:0.1:2", 500)
    codec.decode(GOOD, BLOCK, ROUND, ME)
    with pytest.raises(error):
        codec.decode(GOOD, block, round_, sender)


def payload_of(values: Any, codec: str) -> bytes:
    return HEADER.pack(BLOCK, ROUND, ME) + encode(np.asarray(values, np.float32), codec).data


def test_updates_that_the_run_does_not_have() -> None:
    values = vector(4, 500) * 2.0**-24
    topk = UpdateCodec("topk:0.1:2", 500)
    for codec in ("int4", "topk:0.1:2:64"):
        with pytest.raises(OtherCodec):
            UpdateCodec("topk:0.9:2", 500).decode(payload_of(values, codec), BLOCK, ROUND, ME)
    with pytest.raises(SizeMismatchError, match="kept"):
        topk.decode(payload_of(np.ones(500) * 0.01, "topk:0.2:2"), BLOCK, ROUND, ME)
    with pytest.raises(SizeMismatchError):
        topk.decode(payload_of(values[:400], "topk:0.1:2"), BLOCK, ROUND, ME)
    with pytest.raises(UpdateOversize):
        topk.decode(payload_of(values, "fp32"), BLOCK, ROUND, ME)
    for cut in (b"", GOOD[:47]):
        with pytest.raises(Malformed, match="too short"):
            topk.decode(cut, BLOCK, ROUND, ME)
    for cut in (GOOD[:48], GOOD[:-1], GOOD + b"\0"):
        with pytest.raises(WireError):
            topk.decode(cut, BLOCK, ROUND, ME)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 5000.0])
def test_updates_that_are_no_numbers(value: float) -> None:
    payload = payload_of([0.5, 0.5], "fp32")[:-4] + struct.pack("<f", value)
    with pytest.raises(NonFiniteError):
        UpdateCodec("fp32", 2).decode(payload, BLOCK, ROUND, ME)
    assert UpdateCodec("fp32", 2).max_bytes_at(1) >= len(payload)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255), st.binary(max_size=20))
def test_damaged_updates_raise_only_wire_errors(at: int, flip: int, tail: bytes) -> None:
    damaged = bytearray(GOOD)
    damaged[at] ^= flip
    for payload in (bytes(damaged), bytes(damaged[:at]) + tail, GOOD[:at]):
        try:
            update = UpdateCodec("topk:0.1:2", 500).decode(payload, BLOCK, ROUND, ME)
        except WireError:
            continue
        checked(update, 500)


# --- following the log

Made = tuple[Any, Entry, list[bytes], Any, FixedUpdate]


def decided(codec: UpdateCodec, seeds: list[int], spreads: list[int], edge: bool = False) -> Made:
    """A round as replicas make it: consensus before, entry, what went in, consensus, step."""
    before = vector(99, codec.size, 1 << 20).astype(np.int32)
    if edge:
        before[::2] = VALUE_LIMIT - 1
    made = []
    for seed, spread, peer in zip(seeds, spreads, PEERS, strict=False):
        quanta = vector(seed, codec.size, spread)
        payload, update = codec.encode(quanta, BLOCK, ROUND, peer.peer_id)
        made.append((update_digest(payload), peer.text, payload, update))
    made.sort()
    trend = FixedUpdate(codec.size, None, vector(seeds[0], codec.size))
    result = aggregate([update for *_, update in made], trend=trend)
    after, step = apply_step(before, result.delta)
    parts = [
        Contribution(digest, sender, scale, score)
        for (digest, sender, *_), scale, score in zip(
            made, result.scales, result.scores, strict=True
        )
    ]
    entry = Entry(
        ROUND,
        b"p" * 32,
        weights_digest(after),
        step.digest,
        result.median_norm,
        tuple(parts),
        result.work,
    )
    chosen = [row[2] for row, part in zip(made, parts, strict=True) if part.scale > 0]
    return before, entry, chosen, after, step


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(CODECS),
    st.integers(1, 300),
    st.lists(st.integers(0, 5), min_size=1, max_size=8, unique=False),
    st.lists(st.sampled_from([1, 1 << 12, 1 << 16, 3 << 16, 1 << 24, -(1 << 16)]), min_size=8),
    st.booleans(),
)
def test_a_follower_gets_the_bits_of_the_replicas(
    name: str, size: int, seeds: list[int], spreads: list[int], edge: bool
) -> None:
    codec = UpdateCodec(name, size)
    before, entry, payloads, after, step = decided(codec, seeds, spreads, edge)
    kept = before.copy()
    new, replayed = replay(before, entry, payloads, codec, BLOCK)
    assert new.dtype == np.int32
    assert np.array_equal(new, after)
    assert same(replayed, step)
    assert np.array_equal(before, kept)
    wired = unpack_log(pack_log([entry]))[0]
    assert wired == entry
    assert wired.digest == entry.digest


def clipped_and_left_out() -> tuple[UpdateCodec, Made]:
    codec = UpdateCodec("topk:0.2:4", 400)
    spreads = [1 << 16, 1 << 16, 1 << 16, 3 << 15, 1 << 24, -(1 << 16)]
    return codec, decided(codec, [1, 1, 1, 1, 1, 1], spreads)


def test_the_property_test_sees_clips_and_left_out_updates() -> None:
    _, (_, entry, payloads, _, _) = clipped_and_left_out()
    scales = [c.scale for c in entry.contributions]
    assert scales.count(0) == 2  # a hundred times too large, and against all others
    assert any(0 < scale < 65536 for scale in scales)
    assert len(payloads) == 4


def test_nothing_but_the_updates_of_the_entry_is_replayed() -> None:
    codec, (before, entry, payloads, after, _) = clipped_and_left_out()

    def refused(match: str, **changes: Any) -> None:
        given = {"consensus": before, "entry": entry, "payloads": payloads} | changes
        with pytest.raises(LogError, match=match):
            replay(**given, codec=codec, block=BLOCK)

    refused("not the updates", payloads=payloads[:-1])
    refused("not the updates", payloads=[*payloads, payloads[0]])
    refused("not the updates", payloads=payloads[::-1])
    refused("not the updates", payloads=[payloads[0][:-1], *payloads[1:]])
    refused("do not give its step", entry=replace(entry, step=bytes(32)))
    refused("does not give its consensus", entry=replace(entry, weights=bytes(32)))
    refused("does not give its consensus", consensus=after)
    refused("no valid update", entry=replace(entry, round=ROUND + 1))
    first = next(c for c in entry.contributions if c.scale > 0)
    others = [c for c in entry.contributions if c != first]

    def with_first(**changes: Any) -> Entry:
        parts = sorted([replace(first, **changes), *others], key=lambda c: c.digest)
        return replace(entry, contributions=tuple(parts))

    refused("no valid update", entry=with_first(sender=PEERS[7].text))
    refused("no valid update", entry=with_first(sender="somebody"))
    refused("more than once", entry=with_first(scale=65537))
    refused("do not give its step", entry=with_first(scale=first.scale - 9000))
    refused("not the updates", entry=with_first(scale=0))


def test_a_round_that_left_everybody_out() -> None:
    codec = UpdateCodec("int8", 10)
    before = np.arange(10, dtype=np.int32)
    nothing = FixedUpdate(10, np.zeros(0, np.int64), np.zeros(0, np.int64))
    part = Contribution(b"u" * 32, PEERS[0].text, 0, 0)
    entry = Entry(4, b"p" * 32, weights_digest(before), nothing.digest, 0, (part,))
    after, step = replay(before, entry, [], codec, BLOCK)
    assert np.array_equal(after, before)
    assert same(step, nothing)


contributions = st.builds(
    Contribution,
    st.binary(min_size=32, max_size=32),
    st.sampled_from([peer.text for peer in PEERS]),
    st.integers(0, 65536),
    st.integers(-(2**20), 2**20),
)
digests = st.binary(min_size=32, max_size=32)
entries = st.builds(
    Entry,
    st.integers(-1, 2**40),
    digests,
    digests,
    digests,
    st.integers(0, 2**53 - 1),
    # In the order of their digests, nobody twice: any other is refused.
    st.lists(contributions, max_size=8, unique_by=(lambda c: c.digest, lambda c: c.sender)).map(
        lambda parts: tuple(sorted(parts, key=lambda c: c.digest))
    ),
)


@given(st.lists(entries, max_size=5))
def test_the_digest_of_an_entry_survives_the_wire(log: list[Entry]) -> None:
    wired = unpack_log(pack_log(log))
    assert wired == log
    assert [e.digest for e in wired] == [e.digest for e in log]


# --- snapshots


@pytest.mark.parametrize("size", [1, 1000, SHARD_BYTES // 4, SHARD_BYTES // 4 + 1])
def test_snapshots(size: int) -> None:
    consensus = np.random.default_rng(size).integers(-(2**31), 2**31, size).astype(np.int32)
    index, shards = snapshot_index(consensus), shards_of(consensus)
    assert [len(s) for s in shards[:-1]] == [SHARD_BYTES] * (len(shards) - 1)
    assert index == b"".join(content_digest(shard) for shard in shards)
    back = from_shards([bytes(shard) for shard in shards], size)
    assert back.dtype == np.int32
    assert np.array_equal(back, consensus)
    assert weights_digest(back) == weights_digest(consensus)
    back[0] = 0  # ours to write


def test_snapshots_of_another_size() -> None:
    shards = [bytes(shard) for shard in shards_of(np.arange(100, dtype=np.int32))]
    for bad, size in (
        (shards, 99),
        (shards, 101),
        ([], 100),
        ([shards[0][:4], shards[0][4:]], 100),
    ):
        with pytest.raises(Malformed):
            from_shards(bad, size)
