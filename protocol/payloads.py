"""Records and indexes of snapshots as the payloads of messages."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.frames import BytesLike, content_digest
from protocol.limits import (
    DHT_KEY_BYTES,
    DIGEST_BYTES,
    PEER_ID_BYTES,
    RECORD_MAX_BYTES,
    RECORD_ROW_BYTES,
    RECORDS_PER_REPLY,
    SHARDS_PER_SNAPSHOT,
    SIGNATURE_BYTES,
    TIME_MAX_S,
)
from protocol.messages import Announce
from protocol.packing import (
    Malformed,
    blob,
    bounded,
    number,
    pack,
    unpack_rows,
)
from protocol.records import SignedRecord, verify_record

# --- records (PEERS_REPLY, ANNOUNCE, ANNOUNCE_REPLY)


def pack_records(records: Iterable[SignedRecord]) -> bytes:
    """Records with their signatures; the receiver verifies them."""
    return pack([[r.key, r.subkey, r.value, r.expiration_s] for r in records])


def unpack_records(
    payload: BytesLike, max_records: int = RECORDS_PER_REPLY
) -> list[tuple[bytes, bytes, bytes, float]]:
    """Unverified records as (key, subkey, value, expiration): pass to `admission.read_entries`."""
    rows = unpack_rows(
        payload,
        bounded(payload, max_records * RECORD_ROW_BYTES),
        max_records,
        blob(DHT_KEY_BYTES, DHT_KEY_BYTES),
        blob(PEER_ID_BYTES + 2, PEER_ID_BYTES + 2),
        blob(SIGNATURE_BYTES, RECORD_MAX_BYTES),
        number(0, TIME_MAX_S),
    )
    return [(key, subkey, value, expiration_s) for key, subkey, value, expiration_s in rows]


def announce_of(signed: SignedRecord) -> Announce:
    """The announcement of our own record."""
    return Announce(
        run=signed.record.run,
        block=signed.record.block,
        key=signed.key,
        subkey=signed.subkey,
        value=signed.value,
        expiration_s=signed.expiration_s,
    )


def record_of(announce: Announce, now_s: float) -> SignedRecord:
    """The announced record, verified. Raises `Malformed` or a `RecordError`.

    The sender need not be the record's owner: compare `peer_id` where that matters.
    """
    signed = verify_record(
        announce.key, announce.subkey, announce.value, announce.expiration_s, now_s
    )
    if (signed.record.run, signed.record.block) != (announce.run, announce.block):
        raise Malformed("the announcement is of another run or block than its record")
    return signed


# --- snapshots (INDEX_REPLY)


def pack_index(shard_digests: list[bytes]) -> bytes:
    """A snapshot's index: the digests of its shards. Its own digest is the snapshot's name."""
    return b"".join(shard_digests)


def unpack_index(payload: BytesLike, snapshot: bytes) -> list[bytes]:
    """The shards' digests. Raises `Malformed` unless `snapshot` is the digest of the index."""
    data = bytes(payload)
    count, rest = divmod(len(data), DIGEST_BYTES)
    if rest or not 0 < count <= SHARDS_PER_SNAPSHOT:
        raise Malformed("not an index of shards")
    if content_digest(data) != snapshot:
        raise Malformed("the index is not the one that the snapshot's name stands for")
    return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]
