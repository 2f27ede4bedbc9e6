"""What the payloads of messages hold, except tensors: lists of records, votes, log entries.

Decides their form and the signature of a vote, which travels as a blob so that it can be passed
on by others. Knows nothing of who wins a vote.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol import identity as identities
from protocol.frames import BytesLike, content_digest
from protocol.identity import Identity
from protocol.limits import (
    DHT_KEY_BYTES,
    DIGEST_BYTES,
    DIGESTS_PER_VOTE,
    LOG_ENTRIES_PER_REPLY,
    PAYLOAD_MAX_BYTES,
    PEER_ID_BYTES,
    RECORD_MAX_BYTES,
    RECORDS_PER_REPLY,
    ROUND_MAX,
    SHARDS_PER_SNAPSHOT,
    SIGNATURE_BYTES,
    SIZE_MAX_BYTES,
    TIME_MAX_S,
    VOTE_BLOB_MAX_BYTES,
    VOTES_PER_REPLY,
    Kind,
)
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
from protocol.records import SignedRecord

_VOTE_PREFIX = b"blockswarm vote\0"  # a signature on anything else is never a vote


# --- records (PEERS_REPLY)


def pack_records(records: Iterable[SignedRecord]) -> bytes:
    """Records as they were signed; the asker verifies them itself."""
    return pack([[r.key, r.subkey, r.value, r.expiration_s] for r in records])


def unpack_records(payload: BytesLike) -> list[tuple[bytes, bytes, bytes, float]]:
    """Claims, not verified: hand them to `admission.read_entries`."""
    rows = unpack_rows(
        payload,
        PAYLOAD_MAX_BYTES[Kind.PEERS_REPLY],
        RECORDS_PER_REPLY,
        blob(DHT_KEY_BYTES, DHT_KEY_BYTES),
        blob(PEER_ID_BYTES + 2, PEER_ID_BYTES + 2),
        blob(SIGNATURE_BYTES, RECORD_MAX_BYTES),
        number(0, TIME_MAX_S),
    )
    return [(key, subkey, value, expiration_s) for key, subkey, value, expiration_s in rows]


# --- votes (VOTE_REQUEST, VOTE_REPLY)


@dataclass(frozen=True, kw_only=True)
class Vote:
    """The updates that a replica holds and accepts in a round, on top of a consensus."""

    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    round: int = wire("round", uint(ROUND_MAX))
    consensus: bytes = wire("consensus", digest())
    digests: tuple[bytes, ...] = wire("digests", list_of(digest(), DIGESTS_PER_VOTE), ())


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
    limit = PAYLOAD_MAX_BYTES[Kind.VOTE_REPLY]
    rows = unpack_rows(payload, limit, VOTES_PER_REPLY, blob(1, VOTE_BLOB_MAX_BYTES))
    return [row[0] for row in rows]


# --- the consensus log (LOG_REPLY, INDEX_REPLY)


@dataclass(frozen=True)
class LogEntry:
    """One round of the log: its aggregate, and the consensus after it was applied."""

    round: int
    aggregate: bytes
    aggregate_bytes: int
    consensus: bytes


def pack_log(entries: Iterable[LogEntry]) -> bytes:
    return pack([[e.round, e.aggregate, e.aggregate_bytes, e.consensus] for e in entries])


def unpack_log(payload: BytesLike) -> list[LogEntry]:
    rows = unpack_rows(
        payload,
        PAYLOAD_MAX_BYTES[Kind.LOG_REPLY],
        LOG_ENTRIES_PER_REPLY,
        uint(ROUND_MAX),
        digest(),
        uint(SIZE_MAX_BYTES),
        digest(),
    )
    return [LogEntry(*row) for row in rows]


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
