"""What is inside payloads: records, votes, log entries, updates, shard indexes."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.admission import read_entries
from protocol.frames import Oversize, content_digest
from protocol.identity import Identity
from protocol.limits import (
    CONTRIBUTIONS_PER_ENTRY,
    DECLINED_BYTES,
    DECLINED_PER_VOTE,
    LISTED_PER_VOTE,
    LOG_ENTRIES_PER_REPLY,
    NORM_MAX,
    PAYLOAD_MAX_BYTES,
    RECORDS_PER_ANNOUNCE,
    RECORDS_PER_REPLY,
    ROUND_MAX,
    UPDATES_PER_ENTRY,
    VOTE_BLOB_MAX_BYTES,
    VOTES_PER_REPLY,
    WORK_MAX,
    Kind,
)
from protocol.packing import Malformed, pack
from protocol.payloads import (
    LogEntry,
    Pin,
    Vote,
    announce_of,
    pack_index,
    pack_log,
    pack_records,
    pack_updates,
    pack_votes,
    record_of,
    seal_vote,
    unpack_index,
    unpack_log,
    unpack_records,
    unpack_updates,
    unpack_votes,
    verify_vote,
)
from protocol.records import BadSignature, Record, RecordExpired, seal

NOW_S = 1_800_000_000.0
RUN = b"r" * 32
VOTER = Identity(b"v" * 32)
LISTED = tuple(update * 32 + VOTER.peer_id for update in (b"a", b"b"))
VOTE = Vote(run=RUN, block=2, round=8, consensus=b"c" * 32, base_round=8, listed=LISTED)
PART = (b"u" * 32, VOTER.peer_id, 65536, -1024)
OTHER = (b"v" * 32, Identity(b"o" * 32).peer_id, 0, 1024)
ENTRY = LogEntry(9, b"p" * 32, b"w" * 32, b"s" * 32, 1234, 512, (PART, OTHER))
MANY = tuple(
    (bytes([n]) * 32, Identity(bytes([n]) * 32).peer_id, 65536, -1024)
    for n in range(CONTRIBUTIONS_PER_ENTRY + 1)
)


def test_records_travel_verbatim_and_are_verified_by_the_reader() -> None:
    record = Record(run=RUN, role=1, block=2, round=3, sequence=1)
    signed = [seal(Identity(bytes([i]) * 32), record, NOW_S + 60.5) for i in range(1, 5)]
    entries = unpack_records(pack_records(signed))
    assert sorted(s.peer_id for s in read_entries(entries, NOW_S, 10, {})) == sorted(
        s.peer_id for s in signed
    )


def test_the_longest_lists_fit_their_limits() -> None:
    record = Record(run=RUN, role=1, block=2, round=3, sequence=1)
    longest = dataclasses.replace(seal(VOTER, record, NOW_S), value=bytes(512))
    assert len(pack_records([longest] * RECORDS_PER_REPLY)) <= PAYLOAD_MAX_BYTES[Kind.PEERS_REPLY]
    announced = pack_records([longest] * RECORDS_PER_ANNOUNCE)
    assert len(announced) <= PAYLOAD_MAX_BYTES[Kind.ANNOUNCE_REPLY]
    listed = LISTED[:1] * LISTED_PER_VOTE
    large = dataclasses.replace(VOTE, round=ROUND_MAX, base_round=ROUND_MAX + 1, stage=1)
    declined = tuple(bytes([n]) * DECLINED_BYTES for n in range(DECLINED_PER_VOTE))
    large = dataclasses.replace(large, declined=declined)
    vote = seal_vote(VOTER, dataclasses.replace(large, block=4095, listed=listed))
    assert len(vote.blob) <= VOTE_BLOB_MAX_BYTES
    assert len(pack_votes([vote] * VOTES_PER_REPLY)) <= PAYLOAD_MAX_BYTES[Kind.VOTE_REPLY]
    parts = MANY[:-1]
    entry = LogEntry(ROUND_MAX + 1, b"a" * 32, b"b" * 32, b"c" * 32, NORM_MAX, WORK_MAX, parts)
    longest_log = pack_log([entry] * LOG_ENTRIES_PER_REPLY)
    assert len(longest_log) <= PAYLOAD_MAX_BYTES[Kind.LOG_REPLY]
    assert unpack_log(longest_log) == [entry] * LOG_ENTRIES_PER_REPLY


def test_votes() -> None:
    signed = seal_vote(VOTER, VOTE)
    [blob] = unpack_votes(pack_votes([signed]))
    assert verify_vote(blob) == signed
    for position in range(len(blob)):
        changed = bytearray(blob)
        changed[position] ^= 1
        with pytest.raises(Malformed):
            verify_vote(bytes(changed))
    for cut in (b"", blob[:50], blob[:-1], blob + b"\0", bytes(VOTE_BLOB_MAX_BYTES + 1)):
        with pytest.raises(Malformed):
            verify_vote(cut)


def test_a_vote_of_somebody_else() -> None:
    thief = Identity(b"t" * 32)
    blob = thief.peer_id + seal_vote(VOTER, VOTE).blob[38:]
    with pytest.raises(Malformed, match="did not sign"):
        verify_vote(blob)


def test_announcements() -> None:
    record = Record(run=RUN, role=1, block=2, round=3, sequence=1, head_round=3, proposal_ms=900)
    signed = seal(VOTER, record, NOW_S + 60.5)
    announce = announce_of(signed)
    assert record_of(announce, NOW_S) == signed
    with pytest.raises(RecordExpired):
        record_of(announce, NOW_S + 100)
    for changes in ({"run": b"x" * 32}, {"block": 3}):
        with pytest.raises(Malformed, match="another run or block"):
            record_of(dataclasses.replace(announce, **changes), NOW_S)
    forged = announce.value[:-1] + bytes([announce.value[-1] ^ 1])
    with pytest.raises(BadSignature):
        record_of(dataclasses.replace(announce, value=forged), NOW_S)
    with pytest.raises(BadSignature):
        record_of(dataclasses.replace(announce, expiration_s=NOW_S + 70), NOW_S)


def test_fewer_records_in_an_announcement() -> None:
    signed = seal(VOTER, Record(run=RUN, role=1, block=2, round=3, sequence=1), NOW_S)
    payload = pack_records([signed] * (RECORDS_PER_ANNOUNCE + 1))
    assert len(unpack_records(payload)) == RECORDS_PER_ANNOUNCE + 1
    with pytest.raises(Malformed, match="limit is"):
        unpack_records(payload, RECORDS_PER_ANNOUNCE)


def test_items_of_a_vote_have_one_length() -> None:
    for listed in ((b"a" * 69,), (b"a" * 71,), (b"a" * 32,), LISTED[:1] * (LISTED_PER_VOTE + 1)):
        with pytest.raises(Malformed):
            seal_vote(VOTER, dataclasses.replace(VOTE, listed=listed))


def test_log_entries() -> None:
    genesis = LogEntry(0, b"p" * 32, b"w" * 32, bytes(32), 0, 0, ())
    assert unpack_log(pack_log([genesis, ENTRY])) == [genesis, ENTRY]
    longer = pack([[9, b"p" * 32, b"w" * 32, b"s" * 32, 7, 0, b"", {"newer": [1, 2]}]])
    assert unpack_log(longer) == [LogEntry(9, b"p" * 32, b"w" * 32, b"s" * 32, 7, 0, ())]


@pytest.mark.parametrize(
    "part",
    [
        (b"u" * 31, VOTER.peer_id, 1, 1),
        (b"u" * 32, b"x" * 38, 1, 1),
        (b"u" * 32, VOTER.peer_id, 65537, 1),
        (b"u" * 32, VOTER.peer_id, 1, 2**20 + 1),
        (b"u" * 32, VOTER.peer_id, 1, -(2**20) - 1),
    ],
)
def test_bad_contributions(part: tuple[bytes, bytes, int, int]) -> None:
    with pytest.raises(Malformed):
        pack_log([dataclasses.replace(ENTRY, contributions=(part,))])
    raw = struct.pack(">32s38sIi", *part)
    if len(part[0]) == 32:
        with pytest.raises(Malformed):
            unpack_log(pack([[9, b"p" * 32, b"w" * 32, b"s" * 32, 7, 256, raw]]))


@pytest.mark.parametrize(
    "parts",
    [
        (OTHER, PART),  # descending
        (PART, PART),
        (PART, (PART[0], *OTHER[1:])),  # an update twice
        (PART, (OTHER[0], *PART[1:])),  # a sender twice
        (PART, OTHER, (b"t" * 32, Identity(b"t" * 32).peer_id, 1, 1)),
    ],
)
def test_contributions_have_one_order_and_no_sender_or_update_twice(
    parts: tuple[tuple[bytes, bytes, int, int], ...],
) -> None:
    """Else one consensus would have several entries, and a sender several parts of it."""
    with pytest.raises(Malformed):
        pack_log([dataclasses.replace(ENTRY, contributions=parts)])
    raw = b"".join(struct.pack(">32s38sIi", *part) for part in parts)
    with pytest.raises(Malformed):
        unpack_log(pack([[9, b"p" * 32, b"w" * 32, b"s" * 32, 7, 256, raw]]))


def test_no_log_is_sent_that_would_be_refused() -> None:
    for bad in (
        [ENTRY] * (LOG_ENTRIES_PER_REPLY + 1),
        [dataclasses.replace(ENTRY, contributions=MANY)],
        [dataclasses.replace(ENTRY, round=-1)],
        [dataclasses.replace(ENTRY, median_norm=NORM_MAX + 1)],
        [dataclasses.replace(ENTRY, work=WORK_MAX + 1)],
        [dataclasses.replace(ENTRY, step=b"")],
    ):
        with pytest.raises(Malformed):
            pack_log(bad)


ROW = [1, b"a" * 32, b"b" * 32, b"c" * 32, 5, 256, b""]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80",
        b"\xc0",
        pack([1]),
        pack([ROW[:-1]]),
        pack([[*ROW[:-1], []]]),
        pack([[*ROW[:-1], b"x" * 77]]),
        pack([[*ROW[:-1], b"".join(struct.pack(">32s38sIi", *part) for part in MANY)]]),
        pack([[1, b"a" * 31, *ROW[2:]]]),
        pack([[-1, *ROW[1:]]]),
        pack([[ROUND_MAX + 2, *ROW[1:]]]),
        pack([[*ROW[:4], -5, *ROW[5:]]]),
        pack([[*ROW[:5], -1, b""]]),
        pack([[*ROW[:5], WORK_MAX + 1, b""]]),
        pack([[*ROW, *range(50)]]),
        pack([ROW]) + b"\0",
        pack([ROW])[:-1],
        pack([ROW] * (LOG_ENTRIES_PER_REPLY + 1)),
        b"\xdd\xff\xff\xff\xff",
        b"\x91\xdd\xff\xff\xff\xff",
        b"\x91\x97\xc7\x01\x50\x00",
        bytes(PAYLOAD_MAX_BYTES[Kind.LOG_REPLY] + 1),
    ],
)
def test_bad_lists(payload: bytes) -> None:
    assert unpack_log(pack([ROW]))
    with pytest.raises(Malformed):
        unpack_log(payload)


def test_pins() -> None:
    pin = Pin(17, b"e" * 32, b"s" * 32)
    assert len(pin.pack()) == 72


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=UPDATES_PER_ENTRY))
def test_updates(updates: list[bytes]) -> None:
    payload = pack_updates(updates)
    assert unpack_updates(payload, 50) == updates
    assert unpack_updates(bytearray(payload), 50, len(updates)) == updates


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\1",
        b"\0\0\0\1\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\0\0\0\1\xff\xff\xff\xff" + b"x" * 10,
        pack_updates([b"one", b"two"])[:-1],
        pack_updates([b"one", b"two"]) + b"\0",
        pack_updates([b"longer than ten"]),
        struct.pack(">I", 65) + struct.pack(">I", 1) * 65 + b"x" * 65,
    ],
)
def test_bad_updates(payload: bytes) -> None:
    with pytest.raises(Malformed):
        unpack_updates(payload, 10)


def test_no_updates_are_sent_that_would_be_refused() -> None:
    for bad in ([b""], [b"x"] * (UPDATES_PER_ENTRY + 1)):
        with pytest.raises(Malformed):
            pack_updates(bad)
    with pytest.raises(Oversize):
        pack_updates([bytes(16 << 20)] * 32)
    with pytest.raises(Malformed, match="limit is 2"):
        unpack_updates(pack_updates([b"x"] * 3), 10, 2)


def test_nested_lists_do_not_blow_up() -> None:
    """A payload of empty lists would be 60 times its size as Python objects."""
    size = PAYLOAD_MAX_BYTES[Kind.PEERS_REPLY] - 16
    payload = b"\xdd\x00\x00\x01\x00" + b"\x95" + b"\xdd" + size.to_bytes(4, "big") + b"\x90" * size
    payload = payload[: PAYLOAD_MAX_BYTES[Kind.PEERS_REPLY]]
    tracemalloc.start()
    with pytest.raises(Malformed):
        unpack_records(payload)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(payload)


def test_a_small_payload_takes_little_memory() -> None:
    """msgpack would allocate the limit of the kind, up to 1 MiB, for every reply of a stranger."""
    signed = seal(VOTER, Record(run=RUN, role=1, block=2, round=3, sequence=1), NOW_S)
    small = (
        (unpack_log, pack_log([ENTRY])),
        (unpack_votes, pack_votes([seal_vote(VOTER, VOTE)])),
        (unpack_records, pack_records([signed])),
    )
    for unpack, payload in small:
        tracemalloc.start()
        assert unpack(payload)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000


def test_index_is_what_the_snapshot_is_named_by() -> None:
    shards = [bytes([i]) * 32 for i in range(3)]
    payload = pack_index(shards)
    assert unpack_index(payload, content_digest(payload)) == shards
    for bad in (b"", payload[:-1], payload[:-32]):
        with pytest.raises(Malformed):
            unpack_index(bad, content_digest(payload))
