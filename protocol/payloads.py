"""What the payloads of messages hold, except tensors: records, votes, log entries, updates, pins.

Decides their form and the signature of a vote, which travels as a blob so that it can be passed
on by others. Knows nothing of who wins a vote, nor of what an update or a log entry means
(`swarm/consensus/updates.py` turns these forms into those that rounds work with).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from protocol import identity as identities
from protocol.frames import BytesLike, Oversize, content_digest
from protocol.identity import Identity
from protocol.limits import (
    CONTRIBUTION_BYTES,
    CONTRIBUTIONS_PER_ENTRY,
    DECLINED_BYTES,
    DECLINED_PER_VOTE,
    DHT_KEY_BYTES,
    DIGEST_BYTES,
    LISTED_BYTES,
    LISTED_PER_VOTE,
    LOG_ENTRIES_PER_REPLY,
    NORM_MAX,
    PAYLOAD_MAX_BYTES,
    PEER_ID_BYTES,
    RECORD_MAX_BYTES,
    RECORD_ROW_BYTES,
    RECORDS_PER_REPLY,
    ROUND_MAX,
    SCALE_MAX,
    SCORE_MAX,
    SHARDS_PER_SNAPSHOT,
    SIGNATURE_BYTES,
    TIME_MAX_S,
    UPDATES_PER_ENTRY,
    VOTE_BLOB_MAX_BYTES,
    VOTES_PER_REPLY,
    WORK_MAX,
    Kind,
)
from protocol.messages import Announce
from protocol.packing import (
    Malformed,
    blob,
    block_id,
    digest,
    from_map,
    list_of,
    number,
    pack,
    to_map,
    uint,
    unpack_map,
    unpack_rows,
    wire,
)
from protocol.records import SignedRecord, verify

_VOTE_PREFIX = b"blockswarm vote\0"  # a signature on anything else is never a vote


def _bounded(payload: BytesLike, limit_bytes: int) -> int:
    """The limit for msgpack, which allocates that much at once: no more than what has arrived."""
    return min(limit_bytes, max(len(payload), 1))


# --- records (PEERS_REPLY, ANNOUNCE, ANNOUNCE_REPLY)


def pack_records(records: Iterable[SignedRecord]) -> bytes:
    """Records as they were signed; the asker verifies them itself."""
    return pack([[r.key, r.subkey, r.value, r.expiration_s] for r in records])


def unpack_records(
    payload: BytesLike, max_records: int = RECORDS_PER_REPLY
) -> list[tuple[bytes, bytes, bytes, float]]:
    """Claims, not verified: hand them to `admission.read_entries`."""
    rows = unpack_rows(
        payload,
        _bounded(payload, max_records * RECORD_ROW_BYTES),
        max_records,
        blob(DHT_KEY_BYTES, DHT_KEY_BYTES),
        blob(PEER_ID_BYTES + 2, PEER_ID_BYTES + 2),
        blob(SIGNATURE_BYTES, RECORD_MAX_BYTES),
        number(0, TIME_MAX_S),
    )
    return [(key, subkey, value, expiration_s) for key, subkey, value, expiration_s in rows]


def announce_of(signed: SignedRecord) -> Announce:
    """The announcement of a record of one's own."""
    return Announce(
        run=signed.record.run,
        block=signed.record.block,
        key=signed.key,
        subkey=signed.subkey,
        value=signed.value,
        expiration_s=signed.expiration_s,
    )


def record_of(announce: Announce, now_s: float) -> SignedRecord:
    """The record, verified. Raises `Malformed` or the `RecordError` that says what is wrong.

    Its owner need not be the peer that sent it: compare `peer_id` where that matters.
    """
    signed = verify(announce.key, announce.subkey, announce.value, announce.expiration_s, now_s)
    if (signed.record.run, signed.record.block) != (announce.run, announce.block):
        raise Malformed("the announcement is of another run or block than its record")
    return signed


# --- votes (VOTE_REQUEST, VOTE_REPLY)


@dataclass(frozen=True, kw_only=True)
class Vote:
    """The updates that a replica holds and accepts in a round, on top of a consensus.

    `consensus` is the digest of the log entry that the voter stands on, `base_round` the round of
    that entry plus one. An item of `listed` is an update's digest and its sender's peer id; one of
    `declined` the peer id of a sender whose updates the voter does not accept, and a byte that says
    why (`swarm.consensus.votes.Reason`).
    """

    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    round: int = wire("round", uint(ROUND_MAX))
    stage: int = wire("stage", uint(1), 0)
    consensus: bytes = wire("consensus", digest())
    base_round: int = wire("base_round", uint(ROUND_MAX + 1), 0)
    listed: tuple[bytes, ...] = wire(
        "listed", list_of(blob(LISTED_BYTES, LISTED_BYTES), LISTED_PER_VOTE), ()
    )
    declined: tuple[bytes, ...] = wire(
        "declined", list_of(blob(DECLINED_BYTES, DECLINED_BYTES), DECLINED_PER_VOTE), ()
    )


@dataclass(frozen=True)
class SignedVote:
    """A vote with its voter. `verify_vote` and `seal_vote` are its only honest sources."""

    voter: bytes
    vote: Vote
    blob: bytes


def seal_vote(identity: Identity, vote: Vote) -> SignedVote:
    """Sign a vote: peer id, signature, then the msgpack map."""
    body = pack(to_map(vote))
    signature = identity.sign(_VOTE_PREFIX + body)
    return SignedVote(identity.peer_id, vote, identity.peer_id + signature + body)


def verify_vote(data: bytes) -> SignedVote:
    """The vote, if the peer it names signed it. Raises `Malformed`."""
    start = PEER_ID_BYTES + SIGNATURE_BYTES
    if not start < len(data) <= VOTE_BLOB_MAX_BYTES:
        raise Malformed("not a signed vote")
    voter, signature, body = data[:PEER_ID_BYTES], data[PEER_ID_BYTES:start], data[start:]
    vote = from_map(Vote, unpack_map(body, VOTE_BLOB_MAX_BYTES))
    if not identities.verify(voter, signature, _VOTE_PREFIX + body):
        raise Malformed("the voter did not sign this vote")
    return SignedVote(voter, vote, data)


def pack_votes(votes: Iterable[SignedVote]) -> bytes:
    return pack([[signed.blob] for signed in votes])


def unpack_votes(payload: BytesLike) -> list[bytes]:
    """Blobs, not verified: hand each to `verify_vote`."""
    limit = _bounded(payload, PAYLOAD_MAX_BYTES[Kind.VOTE_REPLY])
    rows = unpack_rows(payload, limit, VOTES_PER_REPLY, blob(1, VOTE_BLOB_MAX_BYTES))
    return [row[0] for row in rows]


# --- the consensus log (LOG_REPLY, AGGREGATE_REPLY, INDEX_REPLY)

_CONTRIBUTION = struct.Struct(f">{DIGEST_BYTES}s{PEER_ID_BYTES}sIi")
_PIN = struct.Struct(f">Q{DIGEST_BYTES}s{DIGEST_BYTES}s")
_COUNT = struct.Struct(">I")
_ENTRY_ROW = (
    uint(ROUND_MAX + 1),
    digest(),
    digest(),
    digest(),
    uint(NORM_MAX),
    uint(WORK_MAX),
    blob(0, CONTRIBUTIONS_PER_ENTRY * CONTRIBUTION_BYTES),
)
Contribution = tuple[bytes, bytes, int, int]  # update, sender's peer id, scale, score


@dataclass(frozen=True)
class LogEntry:
    """The consensus after a round (`round` is that round plus one: genesis has 0).

    `parent` is the digest of the entry before, `weights` and `step` are digests of what they name;
    `work` is what the updates come to together, in 1/256 of one host's;
    a contribution is (update digest, sender's peer id, scale in 1/65536, score in 1/1024).
    """

    round: int
    parent: bytes
    weights: bytes
    step: bytes
    median_norm: int
    work: int
    contributions: tuple[Contribution, ...]


def pack_log(entries: Sequence[LogEntry]) -> bytes:
    """Raises `Malformed` rather than make what nobody would accept."""
    if len(entries) > LOG_ENTRIES_PER_REPLY:
        raise Malformed(f"{len(entries)} log entries, the limit is {LOG_ENTRIES_PER_REPLY}")
    rows = []
    for e in entries:
        if len(e.contributions) > CONTRIBUTIONS_PER_ENTRY:
            raise Malformed(f"a log entry of {len(e.contributions)} contributions")
        parts = b"".join(_CONTRIBUTION.pack(*part) for part in _checked(e.contributions))
        row = (e.round, e.parent, e.weights, e.step, e.median_norm, e.work, parts)
        rows.append([check(value) for check, value in zip(_ENTRY_ROW, row, strict=True)])
    return pack(rows)


def unpack_log(payload: BytesLike) -> list[LogEntry]:
    """Entries of the right form; whether they are a chain is for `swarm.consensus.log` to say."""
    rows = unpack_rows(
        payload,
        _bounded(payload, PAYLOAD_MAX_BYTES[Kind.LOG_REPLY]),
        LOG_ENTRIES_PER_REPLY,
        *_ENTRY_ROW,
    )
    return [
        LogEntry(number, parent, weights, step, median_norm, work, _contributions(parts))
        for number, parent, weights, step, median_norm, work, parts in rows
    ]


def _contributions(data: bytes) -> tuple[Contribution, ...]:
    if len(data) % CONTRIBUTION_BYTES:
        raise Malformed("contributions of a log entry that are cut off")
    return _checked(_CONTRIBUTION.iter_unpack(data))


def _checked(parts: Iterable[Contribution]) -> tuple[Contribution, ...]:
    found = tuple(parts)
    for update, sender, scale, score in found:
        digest()(update)
        identities.public_key_of(sender)
        uint(SCALE_MAX)(scale)
        uint(SCORE_MAX, -SCORE_MAX)(score)
    # One order only, so that one consensus has one entry; and nobody counts twice in it.
    if any(one[0] >= next_one[0] for one, next_one in pairwise(found)):
        raise Malformed("contributions of a log entry that are not in order")
    if len({sender for _, sender, _, _ in found}) != len(found):
        raise Malformed("two contributions of one sender in a log entry")
    return found


@dataclass(frozen=True)
class Pin:
    """A snapshot that a replica serves: of which entry (round plus one, digest), and its name."""

    round: int
    entry: bytes
    snapshot: bytes

    def pack(self) -> bytes:
        return _PIN.pack(self.round, self.entry, self.snapshot)


def pack_updates(updates: Sequence[bytes]) -> bytes:
    """Updates as they were sent: their number, their lengths, then their bytes.

    Not msgpack: they are the bulk of what a follower reads, and should be copied once.
    """
    lengths = [len(update) for update in updates]
    head = _COUNT.pack(len(updates)) + b"".join(map(_COUNT.pack, lengths))
    if len(updates) > UPDATES_PER_ENTRY or 0 in lengths:
        raise Malformed("a list of updates that nobody would accept")
    if len(head) + sum(lengths) > PAYLOAD_MAX_BYTES[Kind.AGGREGATE_REPLY]:
        raise Oversize("more updates than fit into a frame", "ask for them one by one")
    return b"".join([head, *updates])


def unpack_updates(
    payload: BytesLike, max_each_bytes: int, max_count: int = UPDATES_PER_ENTRY
) -> list[bytes]:
    """The updates, whose digests are still to be compared with those of the entry."""
    data = memoryview(payload)
    if len(data) < _COUNT.size:
        raise Malformed("not a list of updates")
    (count,) = _COUNT.unpack_from(data)
    start = _COUNT.size * (count + 1)
    if count > max_count or start > len(data):
        raise Malformed(f"a list of {count} updates, the limit is {max_count}")
    lengths = struct.unpack_from(f">{count}I", data, _COUNT.size)
    if any(not 0 < length <= max_each_bytes for length in lengths):
        raise Malformed(f"an update that is empty or longer than {max_each_bytes} bytes")
    if start + sum(lengths) != len(data):
        raise Malformed("a list of updates that is cut off, or has bytes after its end")
    updates = []
    for length in lengths:
        updates.append(bytes(data[start : start + length]))
        start += length
    return updates


def pack_index(shard_digests: list[bytes]) -> bytes:
    """A snapshot's index; its content digest is the snapshot's name."""
    return b"".join(shard_digests)


def unpack_index(payload: BytesLike, snapshot: bytes) -> list[bytes]:
    """The shards' digests, if this is the index that `snapshot` names."""
    data = bytes(payload)
    count, rest = divmod(len(data), DIGEST_BYTES)
    if rest or not 0 < count <= SHARDS_PER_SNAPSHOT:
        raise Malformed("not an index of shards")
    if content_digest(data) != snapshot:
        raise Malformed("the index is not the one that the snapshot's name stands for")
    return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]
