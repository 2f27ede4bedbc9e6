"""Lists inside payloads: records, votes, log entries, shard indexes."""

from __future__ import annotations

import dataclasses
import tracemalloc

import pytest

from protocol.admission import read_entries
from protocol.frames import content_digest
from protocol.identity import Identity
from protocol.limits import (
    DIGESTS_PER_VOTE,
    LOG_ENTRIES_PER_REPLY,
    PAYLOAD_MAX_BYTES,
    RECORDS_PER_REPLY,
    VOTE_BLOB_MAX_BYTES,
    VOTES_PER_REPLY,
    Kind,
)
from protocol.packing import Malformed, pack
from protocol.payloads import (
    LogEntry,
    Vote,
    pack_index,
    pack_log,
    pack_records,
    pack_votes,
    seal_vote,
    unpack_index,
    unpack_log,
    unpack_records,
    unpack_votes,
    verify_vote,
)
from protocol.records import Record, seal

NOW_S = 1_800_000_000.0
RUN = b"r" * 32
VOTER = Identity(b"v" * 32)
VOTE = Vote(run=RUN, block=2, round=8, consensus=b"c" * 32, digests=(b"a" * 32, b"b" * 32))


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
    digests = tuple(bytes([i]) * 32 for i in range(DIGESTS_PER_VOTE))
    vote = seal_vote(VOTER, dataclasses.replace(VOTE, digests=digests, round=2**40))
    assert len(vote.blob) <= VOTE_BLOB_MAX_BYTES
    assert len(pack_votes([vote] * VOTES_PER_REPLY)) <= PAYLOAD_MAX_BYTES[Kind.VOTE_REPLY]
    entry = LogEntry(2**40, b"a" * 32, 2**40, b"c" * 32)
    assert len(pack_log([entry] * LOG_ENTRIES_PER_REPLY)) <= PAYLOAD_MAX_BYTES[Kind.LOG_REPLY]
    assert len(unpack_log(pack_log([entry] * LOG_ENTRIES_PER_REPLY))) == LOG_ENTRIES_PER_REPLY
    with pytest.raises(Malformed, match="limit is"):
        unpack_log(pack_log([entry] * (LOG_ENTRIES_PER_REPLY + 1)))


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


def test_log_entries() -> None:
    entries = [LogEntry(i, bytes([i]) * 32, 1000 + i, bytes([i + 1]) * 32) for i in range(5)]
    assert unpack_log(pack_log(entries)) == entries
    longer = pack([[1, b"a" * 32, 5, b"c" * 32, {"newer": [1, 2]}]])
    assert unpack_log(longer) == [LogEntry(1, b"a" * 32, 5, b"c" * 32)]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80",
        b"\xc0",
        pack([1]),
        pack([[1, b"a" * 32, 5]]),
        pack([[1, b"a" * 32, 5, [b"c" * 32]]]),
        pack([[1, b"a" * 31, 5, b"c" * 32]]),
        pack([[-1, b"a" * 32, 5, b"c" * 32]]),
        pack([[1, b"a" * 32, 5, b"c" * 32, *range(50)]]),
        pack([[1, b"a" * 32, 5, b"c" * 32]]) + b"\0",
        pack([[1, b"a" * 32, 5, b"c" * 32]])[:-1],
        b"\xdd\xff\xff\xff\xff",
        b"\x91\xdd\xff\xff\xff\xff",
        b"\x91\x94\xc7\x01\x50\x00",
        bytes(PAYLOAD_MAX_BYTES[Kind.LOG_REPLY] + 1),
    ],
)
def test_bad_lists(payload: bytes) -> None:
    with pytest.raises(Malformed):
        unpack_log(payload)


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


def test_index_is_what_the_snapshot_is_named_by() -> None:
    shards = [bytes([i]) * 32 for i in range(3)]
    payload = pack_index(shards)
    assert unpack_index(payload, content_digest(payload)) == shards
    for bad in (b"", payload[:-1], payload[:-32]):
        with pytest.raises(Malformed):
            unpack_index(bad, content_digest(payload))
