"""Records: what an honest peer writes is read back; every forgery is its own typed error."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import records as module
from protocol.errors import WireError
from protocol.frames import VersionMismatch
from protocol.identity import Identity, new_identity
from protocol.limits import (
    BLOCK_MAX,
    BLOCK_NONE,
    BUCKETS_PER_BLOCK,
    CLOCK_SKEW_S,
    RECORD_LIFE_MAX_S,
    RECORD_MAX_BYTES,
)
from protocol.packing import Malformed, pack
from protocol.records import (
    BadSignature,
    ForeignSubkey,
    LifeTooLong,
    PlainValue,
    Record,
    RecordExpired,
    RecordOversize,
    Role,
    SignedRecord,
    WrongKey,
    body_of,
    bucket_of,
    dht_key,
    key_name,
    key_names,
    record_map,
    seal,
    sign_body,
    subkey_of,
    verify_record,
)

NOW_S = 1_800_000_000.0
RUN = bytes(range(32))
OWNER = Identity(b"o" * 32)
THIEF = Identity(b"t" * 32)


def make(**changes: Any) -> Record:
    fields: dict[str, Any] = {
        "run": RUN,
        "role": int(Role.REPLICA | Role.SERVER),
        "block": 3,
        "round": 17,
        "sequence": 4,
        "consensus": b"c" * 32,
        "update": b"u" * 32,
        "update_bytes": 123_456,
        "addresses": ("/ip4/203.0.113.7/tcp/31337", "/ip6/2001:db8::7/udp/31337/quic-v1"),
    }
    return Record(**{**fields, **changes})


def check(signed: SignedRecord, now_s: float = NOW_S, **changes: Any) -> SignedRecord:
    changed = dataclasses.replace(signed, **changes)
    return verify_record(changed.key, changed.subkey, changed.value, changed.expiration_s, now_s)


GOOD = seal(OWNER, make(), NOW_S + 300)


def seal_fields(fields: dict[str, object], expiration_s: float = NOW_S + 300) -> SignedRecord:
    """An honest signature over a body of any form."""
    body = pack(fields)
    value = sign_body(OWNER, GOOD.key, GOOD.subkey, body, expiration_s)
    return dataclasses.replace(GOOD, value=value, expiration_s=expiration_s)


def test_round_trip() -> None:
    assert check(GOOD) == GOOD
    assert GOOD.record == make()
    assert len(GOOD.value) < RECORD_MAX_BYTES


def test_a_full_record_with_relayed_addresses_fits() -> None:
    relay = f"/ip4/203.0.113.200/tcp/31337/p2p/{THIEF.text}/p2p-circuit"
    addresses = ("/ip4/203.0.113.7/tcp/31337", "/ip6/2001:db8:1:2:3:4:5:6/tcp/31337", relay)
    largest = {"round": 2**40, "head_round": 2**40, "proposal_ms": 3_600_000}
    largest |= {"sequence": 2**53 - 1, "update_bytes": 2**40}
    full = {"consensus": b"c" * 32, "update": b"u" * 32, "addresses": addresses}
    signed = seal(OWNER, make(**full, **largest), NOW_S + 300)
    assert len(signed.value) <= RECORD_MAX_BYTES
    assert check(signed).record == signed.record
    assert check(signed).record.addresses == addresses


@given(
    st.builds(
        make,
        role=st.integers(0, 0xFFFF),
        block=st.one_of(st.integers(0, BLOCK_MAX), st.just(BLOCK_NONE)),
        round=st.integers(0, 2**40),
        sequence=st.integers(0, 2**53 - 1),
        consensus=st.one_of(st.just(b""), st.binary(min_size=32, max_size=32)),
        addresses=st.sampled_from([(), ("/dns4/a.example.org/tcp/1",)]),
    )
)
def test_any_record_round_trips(record: Record) -> None:
    assert check(seal(OWNER, record, NOW_S + 1)).record == record


# --- forgeries ----------------------------------------------------------------------------------


def test_foreign_subkey_signed_by_the_thief() -> None:
    # The thief signs, with its own key, a record for the owner's subkey.
    body = body_of(GOOD.value)
    value = sign_body(THIEF, GOOD.key, GOOD.subkey, body, GOOD.expiration_s)
    with pytest.raises(BadSignature):
        check(GOOD, value=value)


def test_somebody_elses_record_under_ones_own_subkey() -> None:
    # Into the thief's own bucket, or the key alone would give it away.
    key = dht_key(key_name(RUN, 3, bucket_of(THIEF.peer_id)))
    with pytest.raises(BadSignature):
        check(GOOD, subkey=subkey_of(THIEF.peer_id), key=key)


@pytest.mark.parametrize(
    "subkey",
    [b"\xa5owner", b"\xc4\x05owner", b"\x01", pack(b"\0" * 38), pack(OWNER.text), GOOD.subkey[:-1]],
)
def test_subkeys_that_are_no_peer(subkey: bytes) -> None:
    with pytest.raises(ForeignSubkey):
        check(GOOD, subkey=subkey)


@pytest.mark.parametrize("subkey", [b"\xc0", b""])
def test_plain_value_over_the_dictionary(subkey: bytes) -> None:
    with pytest.raises(PlainValue):
        check(GOOD, subkey=subkey)


def test_changed_value() -> None:
    for position in range(len(GOOD.value)):
        value = bytearray(GOOD.value)
        value[position] ^= 0x01
        with pytest.raises(WireError):
            check(GOOD, value=bytes(value))


def test_longer_life_than_was_signed() -> None:
    with pytest.raises(BadSignature):
        check(GOOD, expiration_s=GOOD.expiration_s + 60)


@pytest.mark.parametrize("expiration_s", [NOW_S + RECORD_LIFE_MAX_S + 60, 1e300, math.inf])
def test_far_future_expiry(expiration_s: float) -> None:
    with pytest.raises(LifeTooLong):
        check(seal(OWNER, make(), expiration_s))


@pytest.mark.parametrize("expiration_s", [math.nan, -math.inf, None, "soon", True, 10**400])
def test_expiry_that_is_no_time(expiration_s: Any) -> None:
    with pytest.raises(LifeTooLong):
        check(GOOD, expiration_s=expiration_s)


def test_replay_after_expiry() -> None:
    with pytest.raises(RecordExpired):
        check(GOOD, now_s=GOOD.expiration_s + CLOCK_SKEW_S)


def test_replayed_older_record_is_older() -> None:
    newer = seal(OWNER, make(sequence=5, round=18), NOW_S + 300)
    assert check(newer).freshness > check(GOOD).freshness
    # Even if the older one was made to live longer.
    stale = seal(OWNER, make(sequence=3), NOW_S + 800)
    assert check(newer).freshness > check(stale).freshness


def test_clock_skew_is_tolerated_within_its_bound() -> None:
    longest = seal(OWNER, make(), NOW_S + RECORD_LIFE_MAX_S)
    check(longest, now_s=NOW_S - CLOCK_SKEW_S + 0.1)  # our clock is slow
    with pytest.raises(LifeTooLong):
        check(longest, now_s=NOW_S - CLOCK_SKEW_S - 0.1)
    check(GOOD, now_s=GOOD.expiration_s + CLOCK_SKEW_S - 0.1)  # our clock is fast


@pytest.mark.parametrize(
    "name",
    [
        key_name(RUN, 4, bucket_of(OWNER.peer_id)),
        key_name(RUN, 3, (bucket_of(OWNER.peer_id) + 1) % BUCKETS_PER_BLOCK),
        key_name(bytes(32), 3, bucket_of(OWNER.peer_id)),
    ],
)
def test_signed_for_another_key(name: bytes) -> None:
    # Honestly signed over that key, so that only the check of the key itself can notice.
    key = dht_key(name)
    value = sign_body(OWNER, key, GOOD.subkey, body_of(GOOD.value), GOOD.expiration_s)
    with pytest.raises(WrongKey):
        check(GOOD, key=key, value=value)


def test_signature_of_another_purpose() -> None:
    # A record's bytes with a vote's prefix: signatures do not carry over.
    message = module.signed_bytes(GOOD.key, GOOD.subkey, body_of(GOOD.value), GOOD.expiration_s)
    signature = OWNER.sign(b"blockswarm vote\0" + message)
    with pytest.raises(BadSignature):
        check(GOOD, value=body_of(GOOD.value) + signature)


# --- form ---------------------------------------------------------------------------------------


def test_oversize() -> None:
    with pytest.raises(RecordOversize):
        seal(OWNER, make(addresses=("/dns4/" + "aaaaaa." * 20 + "a/tcp/1",) * 4), NOW_S + 1)
    with pytest.raises(RecordOversize):
        check(seal_fields({**record_map(make()), "future": "x" * 400}))


def test_fields_of_a_newer_minor_version_are_ignored() -> None:
    fields = {**record_map(make()), "w": 9, "future": [1, {"x": None}], "t": 0x8001}
    record = check(seal_fields(fields)).record
    assert record == make(minor=9, role=0x8001)


def test_another_major_version_is_named() -> None:
    with pytest.raises(VersionMismatch, match=r"protocol 3\.0"):
        check(seal_fields({"v": 3, "w": 0, "anything": "else"}))


@pytest.mark.parametrize(
    "change",
    [
        {"r": b"short"},
        {"r": "text" * 8},
        {"t": -1},
        {"t": True},
        {"b": 4096},
        {"b": 3.0},
        {"n": 2**41},
        {"s": None},
        {"c": b"x" * 31},
        {"u": 5},
        {"z": -1},
        {"a": "/ip4/1.2.3.4/tcp/1"},
        {"a": ["/ip4/1.2.3.4/tcp/1"] * 5},
        {"v": "1"},
        {"w": 256},
    ],
)
def test_bad_fields(change: dict[str, object]) -> None:
    with pytest.raises(Malformed):
        check(seal_fields({**record_map(make()), **change}))


@pytest.mark.parametrize("name", ["r", "t", "b", "n", "s", "v", "w"])
def test_missing_fields(name: str) -> None:
    fields = record_map(make())
    del fields[name]
    with pytest.raises(Malformed):
        check(seal_fields(fields))


@pytest.mark.parametrize(
    "address",
    [
        "",
        "203.0.113.7:31337",
        "/ip4/203.0.113.7",
        "/ip4/203.0.113.7/tcp/0",
        "/ip4/203.0.113.7/tcp/65536",
        "/ip4/203.0.113.777/tcp/1",
        "/ip4/2001:db8::7/tcp/1",
        "/ip4/0.0.0.0/tcp/1",
        "/ip6/::/tcp/1",
        "/ip4/224.0.0.1/udp/1",
        "/unix/tmp/socket",
        "/dns4/a b/tcp/1",
        "/dns/a..b/tcp/4001",  # Python's resolver raises UnicodeError for these
        "/dns/./tcp/4001",
        "/dns/.a/tcp/4001",
        "/dns/a./tcp/4001",
        "/dns/" + "x" * 64 + ".b/tcp/4001",
        "/ip6/fe80::1%\x1b[31m/tcp/1",
        "/ip4/203.0.113.7/tcp/1/\x1b[2J",
        "/ip4/203.0.113.7/tcp/1/" + "x" * 200,
        "/ip4/٢03.0.113.7/tcp/1",
    ],
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(Malformed):
        check(seal_fields({**record_map(make()), "a": [address]}))


@pytest.mark.parametrize("name", ["a", "host.example", "x" * 63 + ".b", "0-9.A_z"])
def test_names_that_can_be_looked_up(name: str) -> None:
    address = f"/dns4/{name}/tcp/4001"
    assert check(seal_fields({**record_map(make()), "a": [address]})).record.addresses == (address,)


@pytest.mark.parametrize(
    "body",
    [
        b"\xc7\x00\x50",  # hivemind's own extension type
        b"\x81\xa1x\xc7\x01\x50\x00",
        b"\x82\xa1v\x01\xa1v\x01",  # the same key twice
        b"\x81\x01\x02",  # a key that is no text
        b"\x91" * 300,  # deep nesting
        b"\xdf\xff\xff\xff\xff",  # a map of four billion
        b"\xc1",
        b"\x81\xa1x",
        b"\x80\x80",
    ],
)
def test_bad_msgpack(body: bytes) -> None:
    value = sign_body(OWNER, GOOD.key, GOOD.subkey, body, GOOD.expiration_s)
    with pytest.raises(Malformed):
        check(GOOD, value=value)


@pytest.mark.parametrize("change", [{"key": None}, {"value": "text"}, {"value": None}])
def test_values_that_are_no_bytes(change: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        check(GOOD, **change)


# --- keys ---------------------------------------------------------------------------------------


def test_buckets_spread_and_stay() -> None:
    buckets = {bucket_of(new_identity().peer_id) for _ in range(200)}
    assert buckets == set(range(BUCKETS_PER_BLOCK))
    names = key_names(RUN, 3)
    assert len(set(names)) == BUCKETS_PER_BLOCK
    assert GOOD.key in {dht_key(name) for name in names}


def test_hivemind_makes_the_same_bytes() -> None:
    """With the options of its serializer, our map packs to the body that we sign."""
    packed = msgpack.dumps(record_map(make()), use_bin_type=True, strict_types=True)
    assert packed == body_of(GOOD.value)
    assert msgpack.dumps(OWNER.peer_id, use_bin_type=True, strict_types=True) == GOOD.subkey
