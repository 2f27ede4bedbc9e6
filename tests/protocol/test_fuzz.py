"""Mutated frames and records: only typed errors, no hang, no allocation above the limit.

Half of the mutants get their check, digest and signature made right again, so that what lies
behind those is reached too. A few thousand in the normal suite; 100,000 of each with `-m long`.
A case that fails becomes a test of its own, beside the module that it hit.
"""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.admission import read_entries
from protocol.errors import WireError
from protocol.frames import BytesLike, Channel, Deadline, content_digest, encode_head
from protocol.identity import Identity, peer_from_text
from protocol.limits import KIND_LIMITS, PAYLOAD_MAX_BYTES, Kind
from protocol.log import Contribution, Entry, Pin, pack_log, unpack_log, unpack_pin
from protocol.messages import (
    AggregateReply,
    AggregateRequest,
    Announce,
    AnnounceReply,
    BusyReply,
    ErrorReply,
    Hello,
    HelloReply,
    IndexReply,
    LogReply,
    LogRequest,
    Message,
    PeersReply,
    Ping,
    ShardRequest,
    UpdateReply,
    UpdateRequest,
    VoteReply,
    VoteRequest,
    decode_message,
)
from protocol.packing import pack
from protocol.payloads import (
    announce_of,
    pack_index,
    pack_records,
    record_of,
    unpack_index,
    unpack_records,
)
from protocol.records import Record, body_of, record_map, seal, sign_body, verify_record
from protocol.updates import pack_updates, unpack_updates
from protocol.votes import UpdateRef, Vote, pack_votes, seal_vote, unpack_votes, verify_vote

NOW_S = 1_800_000_000.0
OWNER = Identity(b"o" * 32)
RUN, DIGEST = b"r" * 32, b"d" * 32
RECORD = Record(
    run=RUN,
    role=1,
    block=3,
    round=17,
    sequence=4,
    consensus=b"c" * 32,
    addresses=("/ip4/203.0.113.7/tcp/31337", "/ip6/2001:db8::7/udp/31337/quic-v1"),
)
SIGNED = seal(OWNER, RECORD, NOW_S + 300)
OTHER = Identity(b"s" * 32)
LISTED = (UpdateRef(DIGEST, OWNER.text), UpdateRef(RUN, OTHER.text))
VOTE = seal_vote(OWNER, RUN, 1, Vote(OWNER.text, 2, DIGEST, -1, LISTED))
PARTS = (Contribution(DIGEST, OWNER.text, 65536, -7), Contribution(RUN, OTHER.text, 0, 1024))
LOG = [Entry(i - 1, DIGEST, RUN, DIGEST, 1000, PARTS[:i], 256 * i) for i in range(3)]
PINS = (Pin(5, DIGEST, RUN).pack(),) * 2

CORPUS: list[tuple[Message, bytes]] = [
    (Hello(run=RUN, agent="x"), b""),
    (HelloReply(run=RUN, role=3, round=7, now_s=1.8e9, blocks=(0, 2)), b""),
    (PeersReply(count=2), pack_records([SIGNED, SIGNED])),
    (UpdateRequest(run=RUN, block=1, round=9, digest=DIGEST), b""),
    (UpdateReply(block=1, round=9), b"update" * 50),
    (VoteRequest(run=RUN, block=1, round=9, vote=VOTE.blob), b""),
    (VoteReply(count=2), pack_votes([VOTE, VOTE])),
    (announce_of(SIGNED), b""),
    (AnnounceReply(count=2), pack_records([SIGNED, SIGNED])),
    (LogRequest(run=RUN, block=1, since=DIGEST), b""),
    (LogReply(block=1, head_round=9, consensus=DIGEST, count=3, pins=PINS), pack_log(LOG)),
    (AggregateReply(block=1, round=9), pack_updates([b"update" * 9, b"x", b"yy"])),
    (IndexReply(size_bytes=100, shards=2), pack_index([DIGEST, RUN])),
    (ShardRequest(run=RUN, block=1, digest=DIGEST, shard=1), b""),
    (AggregateRequest(run=RUN, block=1, round=9, digest=DIGEST), b""),
    (Ping(nonce=b"abc"), b""),
    (BusyReply(retry_after_s=2.5), b""),
    (ErrorReply(code=6, reason="not here"), b""),
]

# msgpack marks that announce much, and numbers at the edges.
NASTY = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x50",
    b"\xd6\xff\x00\x00\x00\x00",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\x91" * 64,
    b"\x81\xa1a" * 40,
    b"\xc0",
    b"\xc1",
    b"\xa1\xff",
    b"\x00",
    b"\xff" * 8,
]


def mutate(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(out) + 1)
        choice = rng.randrange(7)
        if choice == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif choice == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif choice == 2:
            out[at:at] = rng.choice(NASTY)
        elif choice == 3:
            del out[at : at + rng.choice((1, 2, 8, 40))]
        elif choice == 4:
            nasty = rng.choice(NASTY)
            out[at : at + len(nasty)] = nasty
        elif choice == 5:
            out[at:at] = out[at : at + rng.randrange(1, 60)]
        else:
            del out[at:]
    return bytes(out)


class Bytes:
    """A stream of given bytes, in random pieces; counts its calls, so that a loop would show."""

    def __init__(self, data: bytes, rng: random.Random) -> None:
        self.data, self.rng, self.at, self.calls = data, rng, 0, 0

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        self.calls += 1
        assert self.calls < 2 * len(self.data) + 100
        piece = max_bytes if self.rng.random() < 0.8 else min(max_bytes, 7)
        chunk = self.data[self.at : self.at + piece]
        self.at += len(chunk)
        return chunk

    async def write(self, data: BytesLike, timeout_s: float) -> None: ...

    async def close(self) -> None: ...

    def abort(self) -> None: ...


def drive(coroutine: Coroutine[Any, Any, None]) -> None:
    with pytest.raises(StopIteration):
        coroutine.send(None)


UNPACK: dict[Kind, Callable[[bytes], object]] = {
    Kind.PEERS_REPLY: lambda p: read_entries(unpack_records(p), NOW_S, 16, {}),
    Kind.ANNOUNCE_REPLY: lambda p: read_entries(unpack_records(p, 16), NOW_S, 16, {}),
    Kind.AGGREGATE_REPLY: lambda p: unpack_updates(p, 1000),
    Kind.VOTE_REPLY: lambda p: [verify_vote(blob) for blob in unpack_votes(p)],
    Kind.LOG_REPLY: unpack_log,
    Kind.INDEX_REPLY: lambda p: unpack_index(p, content_digest(p)),
}


async def digest_stream(data: bytes, rng: random.Random) -> None:
    """All that a node does with a stranger's stream, as long as it makes sense."""
    channel = Channel(Bytes(data, rng), Deadline.after(60))
    try:
        for _ in range(4):
            head = await channel.receive_head()
            message = decode_message(head)
            payload = bytes(await channel.receive_bytes(head))
            if head.kind in UNPACK and payload:
                UNPACK[head.kind](payload)
            if isinstance(message, VoteRequest):
                verify_vote(message.vote)
            if isinstance(message, Announce):
                record_of(message, NOW_S)
            if isinstance(message, LogReply):
                [unpack_pin(pin) for pin in message.pins]
    except WireError:
        pass


def mutant_frame(rng: random.Random) -> bytes:
    message, payload = rng.choice(CORPUS)
    header = message.to_header()
    if rng.random() < 0.5:
        tail = payload + content_digest(payload) if payload else b""
        whole = encode_head(message.KIND, header, len(payload)) + tail
        if rng.random() < 0.3:  # lengths and kind of the prefix
            at = rng.choice((6, 8, 10, 12, 16))
            number = struct.pack(">I", rng.choice((0, 1, 255, 2**16 - 1, 2**31, 2**32 - 1)))
            whole = whole[:at] + number + whole[at + 4 :]
        return mutate(rng, whole)
    if payload and rng.random() < 0.6:
        payload = mutate(rng, payload)
    else:
        header = mutate(rng, header)
    kind = message.KIND if rng.random() < 0.9 else rng.choice(list(Kind))
    tail = payload + content_digest(payload) if payload else b""
    return encode_head(kind, header, len(payload)) + tail


def check_record(rng: random.Random) -> None:
    key, subkey, value = SIGNED.key, SIGNED.subkey, SIGNED.value
    expiration_s = SIGNED.expiration_s
    choice = rng.randrange(6)
    if choice == 0:
        value = mutate(rng, value)
    elif choice == 1:
        subkey = mutate(rng, subkey)
    elif choice == 2:
        key = mutate(rng, key)
    elif choice == 3:
        expiration_s = struct.unpack(">d", rng.randbytes(8))[0]
    elif choice == 4:  # honestly signed nonsense
        body = mutate(rng, body_of(value))
        value = sign_body(OWNER, key, subkey, body, expiration_s)
    else:
        fields = record_map(RECORD)
        fields[rng.choice(list(fields))] = rng.choice(
            [None, -1, 2**63, 1e308, "", "/" * 300, b"", b"x" * 200, [], [[]] * 9, {}, True]
        )
        value = sign_body(OWNER, key, subkey, pack(fields), expiration_s)
    try:
        signed = verify_record(key, subkey, value, expiration_s, NOW_S)
    except WireError:
        return
    assert signed.peer_id == OWNER.peer_id
    assert len(signed.value) <= 512


def fuzz(cases: int, seed: int, one_case: Callable[[random.Random], None]) -> None:
    rng = random.Random(seed)
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        slowest_s = 0.0
        for number in range(cases):
            started = time.perf_counter()
            try:
                one_case(rng)
            except Exception as error:
                raise AssertionError(f"case {number} of seed {seed}") from error
            slowest_s = max(slowest_s, time.perf_counter() - started)
        peak = tracemalloc.get_traced_memory()[1] - base
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000, "something was allocated that no mutant contains"
    assert slowest_s < 5


def frame_case(rng: random.Random) -> None:
    drive(digest_stream(mutant_frame(rng), rng))


def test_mutated_frames() -> None:
    fuzz(4000, 1, frame_case)


def test_mutated_records() -> None:
    fuzz(4000, 2, check_record)


@pytest.mark.long
def test_100_000_mutated_frames() -> None:
    fuzz(100_000, 3, frame_case)


@pytest.mark.long
def test_100_000_mutated_records() -> None:
    fuzz(100_000, 4, check_record)


def test_the_corpus_itself_is_accepted() -> None:
    """Otherwise the mutants would never get behind the first check."""
    rng = random.Random(0)
    for message, payload in CORPUS:
        tail = payload + content_digest(payload) if payload else b""
        data = encode_head(message.KIND, message.to_header(), len(payload)) + tail
        channel = Channel(Bytes(data, rng), Deadline.after(60))

        async def accept(channel: Channel = channel, message: Message = message) -> None:
            head = await channel.receive_head()
            assert decode_message(head) == message
            received = bytes(await channel.receive_bytes(head))
            if head.kind in UNPACK:
                assert UNPACK[head.kind](received)

        drive(accept())


@given(st.binary(max_size=300))
def test_arbitrary_bytes_as_a_stream(data: bytes) -> None:
    drive(digest_stream(data, random.Random(0)))


@given(st.sampled_from(Kind), st.binary(max_size=300), st.binary(max_size=300))
def test_arbitrary_header_and_payload(kind: Kind, header: bytes, payload: bytes) -> None:
    payload = payload[: KIND_LIMITS[kind].payload_bytes]
    tail = payload + content_digest(payload) if payload else b""
    drive(digest_stream(encode_head(kind, header, len(payload)) + tail, random.Random(0)))
    for unpack in UNPACK.values():
        try:
            unpack(payload)
        except WireError:
            continue


@given(st.text(max_size=80))
def test_arbitrary_peer_texts(text: str) -> None:
    try:
        peer_from_text(text)
    except WireError:
        return


def test_full_size_payloads_of_nothing() -> None:
    """The largest list payloads, filled with the cheapest nonsense."""
    for kind, unpack in UNPACK.items():
        for byte in (b"\x90", b"\x80", b"\xc0", b"\x00", b"\x91", b"\xdd"):
            tracemalloc.start()
            try:
                unpack(byte * min(PAYLOAD_MAX_BYTES[kind], 600_000))
            except WireError:
                pass
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak < 4 * PAYLOAD_MAX_BYTES[kind] + 50_000  # an Unpacker and an error
