"""Signed records in the DHT: what a peer says about itself, under which keys, and for how long.

Only the owner of a subkey can write its record. An adapter in `node/` passes hivemind's (key,
subkey, value, expiration) through `verify`. The choice among many valid records is
`admission.py`'s.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import re
import struct
from dataclasses import dataclass
from enum import IntFlag
from functools import lru_cache

from protocol import identity as identities
from protocol.errors import WireError
from protocol.frames import check_version, content_digest
from protocol.identity import Identity
from protocol.limits import (
    ADDRESS_MAX_BYTES,
    ADDRESSES_PER_RECORD,
    BUCKETS_PER_BLOCK,
    CLOCK_SKEW_S,
    DHT_KEY_BYTES,
    DIGEST_BYTES,
    LABEL_MAX_BYTES,
    PEER_ID_BYTES,
    PROPOSAL_MAX_MS,
    RECORD_LIFE_MAX_S,
    RECORD_MAX_BYTES,
    ROUND_MAX,
    SEQUENCE_MAX,
    SIGNATURE_BYTES,
    SIZE_MAX_BYTES,
)
from protocol.packing import (
    Malformed,
    block_id,
    digest,
    digest_or_empty,
    from_map,
    list_of,
    pack,
    round_or_genesis,
    to_map,
    uint,
    unpack_map,
    wire,
)
from protocol.version import PROTOCOL_MAJOR, PROTOCOL_MINOR

# hivemind's reserved subkeys: msgpack nil marks a plain value, an empty one a dictionary.
_RESERVED_SUBKEYS = (b"\xc0", b"")
_SUBKEY_PREFIX = bytes([0xC4, PEER_ID_BYTES])  # msgpack: bin 8
_SIGNED_PREFIX = b"blockswarm record\0"  # a signature on anything else is never a record


class RecordError(WireError):
    """A record that no honest peer would have stored."""


class PlainValue(RecordError):
    """A value without a subkey, which would replace all records under the key."""


class ForeignSubkey(RecordError):
    """The subkey is not an Ed25519 peer id."""


class RecordOversize(RecordError):
    """The record is longer than RECORD_MAX_BYTES."""


class RecordExpired(RecordError):
    """The record's expiration has passed."""


class LifeTooLong(RecordError):
    """The record's expiration is further away than the protocol allows."""


class WrongKey(RecordError):
    """The record is stored under another key than that of its run, block and owner."""


class BadSignature(RecordError):
    """The owner of the subkey did not sign this value, key and expiration."""


class Role(IntFlag):
    """What a peer does; several at once are normal. Unknown bits of newer versions are kept."""

    REPLICA = 1
    SEED = 2
    ASSEMBLER = 4
    SERVER = 8


HOST_PATTERN = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/(tcp|udp)/([0-9]{1,5})(/[!-~]*)?", re.ASCII
)


_LABEL = rf"[A-Za-z0-9_-]{{1,{LABEL_MAX_BYTES}}}"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)


def is_host_name(text: str) -> bool:
    """Whether `text` can be given to a resolver. For an empty or too long label Python's raises a
    UnicodeError, which callers that dial do not expect."""
    return _HOST_NAME.fullmatch(text) is not None


def _address(value: object) -> str:
    """A multiaddress that can be dialled: a host, a port, then anything printable."""
    if not isinstance(value, str) or len(value) > ADDRESS_MAX_BYTES:
        raise Malformed("not a multiaddress")
    if not value.isascii() or not value.isprintable():  # it will stand on a terminal
        raise Malformed("not a multiaddress")
    match = HOST_PATTERN.fullmatch(value)
    if match is None or not 0 < int(match[4]) < 65536:
        raise Malformed("not a multiaddress with a host and a port")
    if match[1] in ("ip4", "ip6"):
        try:
            host = ipaddress.ip_address(match[2])
        except ValueError:
            raise Malformed("not an IP address") from None
        if host.version != int(match[1][2]) or host.is_unspecified or host.is_multicast:
            raise Malformed("an address that nobody can dial")
    elif not is_host_name(match[2]):
        raise Malformed("not a host name")
    return value


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a peer says about itself. Names on the wire are one letter, to fit into 512 bytes.

    `consensus` is the digest of the head of its block's log, `head_round` that head's round (-1:
    genesis), `proposal_ms` the first deadline that the peer proposes.
    """

    run: bytes = wire("r", digest())
    role: int = wire("t", uint(0xFFFF))
    block: int = wire("b", block_id)
    round: int = wire("n", uint(ROUND_MAX))
    sequence: int = wire("s", uint(SEQUENCE_MAX))
    consensus: bytes = wire("c", digest_or_empty(), b"")
    head_round: int = round_or_genesis("h", -1)
    update: bytes = wire("u", digest_or_empty(), b"")
    update_bytes: int = wire("z", uint(SIZE_MAX_BYTES), 0)
    proposal_ms: int = wire("p", uint(PROPOSAL_MAX_MS), 0)
    addresses: tuple[str, ...] = wire("a", list_of(_address, ADDRESSES_PER_RECORD), ())
    major: int = wire("v", uint(255), PROTOCOL_MAJOR)
    minor: int = wire("w", uint(255), PROTOCOL_MINOR)


@dataclass(frozen=True)
class SignedRecord:
    """A record with the bytes that were signed. Made by `verify` and `seal`."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_s: float
    peer_id: bytes
    record: Record

    @property
    def freshness(self) -> tuple[int, float]:
        """Orders records of one peer: the larger, the newer."""
        return self.record.sequence, self.expiration_s


# --- keys ---------------------------------------------------------------------------------------


def bucket_of(peer_id: bytes) -> int:
    return content_digest(peer_id)[0] % BUCKETS_PER_BLOCK


def key_name(run: bytes, block: int, bucket: int) -> bytes:
    """The key as given to hivemind, which stores under its SHA-1."""
    if len(run) != DIGEST_BYTES or not 0 <= bucket < BUCKETS_PER_BLOCK:
        raise ValueError("a run id is a digest, a bucket is 0 to 3")
    return b"blockswarm/%d\0" % PROTOCOL_MAJOR + run + struct.pack(">HB", block, bucket)


def key_names(run: bytes, block: int) -> list[bytes]:
    """All keys of one block, looked up in one call."""
    return [key_name(run, block, bucket) for bucket in range(BUCKETS_PER_BLOCK)]


def dht_key(name: bytes) -> bytes:
    return hashlib.sha1(name, usedforsecurity=False).digest()


def subkey_of(peer_id: bytes) -> bytes:
    """The subkey as it is on the wire: msgpack of the peer id."""
    return _SUBKEY_PREFIX + peer_id


def peer_of_subkey(subkey: bytes) -> bytes:
    if subkey in _RESERVED_SUBKEYS:
        raise PlainValue("a plain value where only peers' own subkeys may be")
    peer_id = subkey[len(_SUBKEY_PREFIX) :]
    try:
        if not subkey.startswith(_SUBKEY_PREFIX):
            raise Malformed("not bytes")
        identities.public_key_of(peer_id)
    except Malformed:
        raise ForeignSubkey("the subkey is not an Ed25519 peer id") from None
    return peer_id


# --- signing and verifying ----------------------------------------------------------------------


def signed_bytes(key: bytes, subkey: bytes, body: bytes, expiration_s: float) -> bytes:
    """What the signature covers. Unambiguous, since key and subkey have fixed lengths."""
    return _SIGNED_PREFIX + key + subkey + struct.pack(">d", expiration_s) + body


def record_map(record: Record) -> dict[str, object]:
    """The value for hivemind's `store`; packed, it is the body that is signed."""
    return {**to_map(record), "v": record.major, "w": record.minor}


def sign_body(
    identity: Identity, key: bytes, subkey: bytes, body: bytes, expiration_s: float
) -> bytes:
    """Body with its signature: what a validator's `sign_value` returns."""
    return body + identity.sign(signed_bytes(key, subkey, body, expiration_s))


def body_of(value: bytes) -> bytes:
    """A verified value without its signature: what a validator's `strip_value` returns."""
    return value[:-SIGNATURE_BYTES]


def seal(identity: Identity, record: Record, expiration_s: float) -> SignedRecord:
    """Sign our own record. Raises `RecordOversize` if there are too many addresses."""
    key = dht_key(key_name(record.run, record.block, bucket_of(identity.peer_id)))
    subkey = subkey_of(identity.peer_id)
    value = sign_body(identity, key, subkey, pack(record_map(record)), expiration_s)
    if len(value) > RECORD_MAX_BYTES:
        raise RecordOversize(f"a record of {len(value)} bytes", "announce fewer addresses")
    return SignedRecord(key, subkey, value, expiration_s, identity.peer_id, record)


def verify_record(
    key: bytes, subkey: bytes, value: bytes, expiration_s: float, now_s: float
) -> SignedRecord:
    """The record, if it is valid and signed by its owner; otherwise raises a `WireError`."""
    signed = parse_claim(key, subkey, value, expiration_s, now_s)
    check_signature(signed)
    return signed


def parse_claim(
    key: bytes, subkey: bytes, value: bytes, expiration_s: float, now_s: float
) -> SignedRecord:
    """The record after all checks but the signature, cheapest first. For `admission.read_entries`.

    Types are checked too, since hivemind passes on whatever another node's msgpack contained.
    """
    if not all(isinstance(part, bytes) for part in (key, subkey, value)):
        raise Malformed("key, subkey and value must be bytes")
    if not isinstance(expiration_s, float) or not math.isfinite(expiration_s):
        raise LifeTooLong("an expiration that is no time")
    peer_id = peer_of_subkey(subkey)
    if len(value) > RECORD_MAX_BYTES:
        raise RecordOversize(f"a record of {len(value)} bytes, the limit is {RECORD_MAX_BYTES}")
    if expiration_s > now_s + RECORD_LIFE_MAX_S + CLOCK_SKEW_S:
        raise LifeTooLong(f"a record may live {RECORD_LIFE_MAX_S:g} s")
    if expiration_s <= now_s - CLOCK_SKEW_S:
        raise RecordExpired("the record has expired")
    if len(value) <= SIGNATURE_BYTES:
        raise Malformed("too short for a signed record")
    record, expected = _read(body_of(value), peer_id)
    if len(key) != DHT_KEY_BYTES or key != expected:
        raise WrongKey("the record belongs under another key")
    return SignedRecord(bytes(key), bytes(subkey), bytes(value), expiration_s, peer_id, record)


@lru_cache(256)  # the same record arrives from many peers; the next round has a new one
def _read(body: bytes, peer_id: bytes) -> tuple[Record, bytes]:
    """The record in `body`, and the DHT key under which this peer must store it."""
    fields = unpack_map(body, RECORD_MAX_BYTES)
    major, minor = uint(255)(fields.get("v")), uint(255)(fields.get("w"))
    assert isinstance(major, int)
    assert isinstance(minor, int)
    check_version(major, minor)  # before the schema: another major version has another one
    record = from_map(Record, fields)
    return record, dht_key(key_name(record.run, record.block, bucket_of(peer_id)))


def check_signature(signed: SignedRecord) -> None:
    message = signed_bytes(signed.key, signed.subkey, body_of(signed.value), signed.expiration_s)
    if not _is_signed(signed.peer_id, signed.value[-SIGNATURE_BYTES:], message):
        raise BadSignature("the subkey's owner did not sign this record")


@lru_cache(256)  # a record arrives from its owner and from others: it is verified once
def _is_signed(peer_id: bytes, signature: bytes, message: bytes) -> bool:
    return identities.verify(peer_id, signature, message)
