"""protocol/vectors.json, in both directions: what we encode is the hex, what the hex says is ours.

The file is for whoever writes a second implementation. A change of it is a change of the
protocol. `python -m tests.protocol.test_vectors` writes it anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from protocol import errors, frames, packing, payloads, records
from protocol import identity as identities
from protocol.digests import weights_digest
from protocol.frames import Channel, Deadline, Head, content_digest, encode_head
from protocol.identity import Identity, peer_from_text, peer_text
from protocol.limits import PAYLOAD_MAX_BYTES, Kind
from protocol.log import Contribution, Entry, Pin, genesis, pack_log, unpack_log, unpack_pin
from protocol.messages import ErrorCode, decode_message
from protocol.records import Record
from protocol.updates import pack_updates, unpack_updates
from protocol.version import PROTOCOL_MAJOR, PROTOCOL_MINOR
from protocol.votes import Reason, UpdateRef, Vote, pack_votes, seal_vote, unpack_votes, verify_vote
from swarm.consensus.fixed_point import FixedUpdate
from swarm.consensus.updates import UpdateCodec, shards_of, snapshot_index
from tests.support.loopless import BytesStream, run
from tests.support.message_examples import EXAMPLES
from tests.support.paths import ROOT

PATH = ROOT / "protocol" / "vectors.json"
NOW_S = 1_800_000_000.0
OWNER = Identity(bytes(range(32)))
RUN = bytes(range(100, 132))
RECORDS = [
    Record(run=RUN, role=2, block=65535, round=0, sequence=1),
    Record(
        run=RUN,
        role=9,
        block=3,
        round=17,
        sequence=4,
        consensus=b"c" * 32,
        head_round=16,
        update=b"u" * 32,
        update_bytes=123_456,
        proposal_ms=2500,
        addresses=("/ip4/203.0.113.7/tcp/31337", "/ip6/2001:db8::7/tcp/31337"),
    ),
]
LISTED = (UpdateRef(b"a" * 32, OWNER.text), UpdateRef(b"b" * 32, Identity(bytes(32)).text))
OTHER = Identity(bytes(range(1, 33)))
VOTE = Vote(OWNER.text, 17, b"c" * 32, 16, LISTED, ((OTHER.text, Reason.HARM),))
SIGNED_VOTE = seal_vote(OWNER, RUN, 3, VOTE)
PARTS = (
    Contribution(b"u" * 32, OWNER.text, 65536, 512),
    Contribution(b"v" * 32, OTHER.text, 0, -1024),
)
SIGNED_AT = 38 + 64  # after the voter and the signature
WEIGHTS = np.array([0, 1, -1, 2**31 - 1, -(2**24)], dtype=np.int32)
STEP = FixedUpdate(5, np.array([1, 4]), np.array([7, -(2**31)]))
GENESIS = genesis(RUN.hex(), 3, weights_digest(WEIGHTS))
LOG = [
    GENESIS,
    Entry(16, b"p" * 32, weights_digest(WEIGHTS), STEP.digest, 1001, PARTS, 512),
]
PIN = Pin(16, b"e" * 32, b"s" * 32)
UPDATE = np.array([1, -3, 2**20, -(2**24), 0], dtype=np.int64)


def plain(value: Any) -> Any:
    """JSON form of a map's values: bytes become {"hex": ...}."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def unplain(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"hex"}:
        return bytes.fromhex(value["hex"])
    if isinstance(value, dict):
        return {k: unplain(v) for k, v in value.items()}
    return [unplain(item) for item in value] if isinstance(value, list) else value


def make_frame(kind: int, header: bytes, payload: bytes) -> bytes:
    tail = payload + content_digest(payload) if payload else b""
    return encode_head(kind, header, len(payload)) + tail


def refused_frames() -> dict[str, bytes]:
    good = make_frame(Kind.UPDATE_REPLY, b"\x80", b"payload")
    return {
        "Truncated": good[:-1],
        "DigestMismatch": good.replace(b"payload", b"pAyload"),
        "Malformed": b"HTTP" + good[4:],
        "VersionMismatch": good[:4] + b"\x03" + good[5:],
        "UnknownKind": encode_head(999, b"", 0),
        "Oversize": encode_head(Kind.PING, b"", 1),
        "StreamEnded": b"",
    }


def refused_records() -> list[dict[str, Any]]:
    good = records.seal(OWNER, RECORDS[1], NOW_S + 300)
    thief = Identity(bytes(32))
    cases: list[tuple[Any, ...]] = []

    def case(error: str, **changes: Any) -> None:
        fields = {"key": good.key, "subkey": good.subkey, "value": good.value}
        fields |= {"expiration_s": good.expiration_s} | changes
        cases.append((error, *fields.values()))

    body = records.body_of(good.value)
    stolen = records.sign_body(thief, good.key, good.subkey, body, good.expiration_s)
    case("BadSignature", value=stolen)
    case("BadSignature", expiration_s=good.expiration_s + 1)
    case("BadSignature", value=good.value[:-1] + bytes([good.value[-1] ^ 1]))
    case("PlainValue", subkey=b"\xc0")
    case("ForeignSubkey", subkey=b"\xa5owner")
    case("WrongKey", key=bytes(20))
    case("LifeTooLong", expiration_s=NOW_S + 1000)
    case("RecordExpired", expiration_s=NOW_S - 10)
    case("RecordOversize", value=good.value + bytes(512))
    case("Malformed", value=b"\x80" + bytes(64))
    twice = records.sign_body(OWNER, good.key, good.subkey, b"\x82\xa1v\x01\xa1v\x01", NOW_S + 300)
    case("Malformed", value=twice)
    names = ("error", "key", "subkey", "value", "expiration_s")
    return [plain(dict(zip(names, row, strict=True))) for row in cases]


def build() -> dict[str, Any]:
    signed = [records.seal(OWNER, record, NOW_S + 300.5) for record in RECORDS]
    return {
        "protocol": f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
        "now_s": NOW_S,
        "identity": {
            "seed": plain(bytes(range(32))),
            "file": plain(OWNER.to_bytes()),
            "peer_id": plain(OWNER.peer_id),
            "peer_text": OWNER.text,
            "message": plain(b"blockswarm"),
            "signature": plain(OWNER.sign(b"blockswarm")),
        },
        "digests": [
            {"data": plain(data), "digest": plain(content_digest(data))}
            for data in (b"", b"blockswarm", bytes(1025))
        ],
        "dht_keys": [
            {
                "run": plain(RUN),
                "block": block,
                "bucket": bucket,
                "name": plain(name),
                "key": plain(records.dht_key(name)),
            }
            for block, bucket in ((0, 0), (3, 2), (65535, 3))
            for name in [records.key_name(RUN, block, bucket)]
        ],
        "records": [
            {
                "fields": plain(records.record_map(s.record)),
                "expiration_s": s.expiration_s,
                "key": plain(s.key),
                "subkey": plain(s.subkey),
                "value": plain(s.value),
            }
            for s in signed
        ],
        "records_refused": refused_records(),
        "messages": [
            {
                "name": type(m).__name__,
                "kind": int(m.KIND),
                "fields": plain(packing.to_map(m)),
                "header": plain(m.to_header()),
            }
            for m in EXAMPLES
        ],
        "frames": [
            {
                "kind": int(kind),
                "header": plain(header),
                "payload": plain(payload),
                "frame": plain(make_frame(kind, header, payload)),
            }
            for kind, header, payload in (
                (Kind.PING, b"\x80", b""),
                (Kind.UPDATE_REPLY, b"\x80", b"payload"),
            )
        ],
        "frames_refused": [
            {"error": name, "frame": plain(data)} for name, data in refused_frames().items()
        ],
        "vote": {
            "fields": plain(packing.unpack_map(SIGNED_VOTE.blob[SIGNED_AT:], 8192)),
            "blob": plain(SIGNED_VOTE.blob),
        },
        "payloads": {
            "records": plain(payloads.pack_records(signed)),
            "votes": plain(pack_votes([SIGNED_VOTE])),
            "log": plain(pack_log(LOG)),
            "updates": plain(pack_updates([b"first", b"second one"])),
            "index": plain(payloads.pack_index([b"a" * 32, b"b" * 32])),
        },
        "pin": {"round": 16, "entry": plain(PIN.entry), "snapshot": plain(PIN.snapshot)}
        | {"packed": plain(PIN.pack())},
        "log": [
            {"fields": plain(dataclasses.asdict(entry)), "digest": plain(entry.digest)}
            for entry in LOG
        ],
        "weights": {
            "quanta": WEIGHTS.tolist(),
            "digest": plain(weights_digest(WEIGHTS)),
            "shard": plain(bytes(shards_of(WEIGHTS)[0])),
            "snapshot": plain(content_digest(snapshot_index(WEIGHTS))),
        },
        "step": {"quanta": STEP.dense().tolist(), "digest": plain(STEP.digest)},
        "update": update_vector(),
    }


def update_vector() -> dict[str, Any]:
    """The codec has vectors of its own: here the header, and the rounding to 2^-24."""
    payload, update = UpdateCodec("bf16", len(UPDATE)).encode(UPDATE, 3, 17, OWNER.peer_id)
    return {
        "codec": "bf16",
        "block": 3,
        "round": 17,
        "sender": plain(OWNER.peer_id),
        "payload": plain(payload),
        "quanta": update.dense().tolist(),
    }


def load() -> dict[str, Any]:
    result: dict[str, Any] = unplain(json.loads(PATH.read_text()))
    return result


def test_what_we_encode_is_what_the_file_says() -> None:
    assert json.loads(PATH.read_text()) == build()


def test_identity() -> None:
    vector = load()["identity"]
    identity = Identity.from_bytes(vector["file"])
    assert identity.to_bytes()[4:36] == vector["seed"]
    assert identity.peer_id == vector["peer_id"] == peer_from_text(vector["peer_text"])
    assert peer_text(vector["peer_id"]) == vector["peer_text"]
    assert identities.verify(vector["peer_id"], vector["signature"], vector["message"])


def test_digests_and_keys() -> None:
    for vector in load()["digests"]:
        assert content_digest(vector["data"]) == vector["digest"]
    for vector in load()["dht_keys"]:
        name = records.key_name(vector["run"], vector["block"], vector["bucket"])
        assert (name, records.dht_key(name)) == (vector["name"], vector["key"])


def test_records() -> None:
    vectors = load()
    for vector, record in zip(vectors["records"], RECORDS, strict=True):
        where = (vector["key"], vector["subkey"], vector["value"], vector["expiration_s"])
        signed = records.verify_record(*where, vectors["now_s"])
        assert signed.record == record
        assert packing.unpack_map(records.body_of(signed.value), 512) == vector["fields"]
    for vector in vectors["records_refused"]:
        where = (vector["key"], vector["subkey"], vector["value"], vector["expiration_s"])
        with pytest.raises(errors.WireError) as caught:
            records.verify_record(*where, vectors["now_s"])
        assert type(caught.value).__name__ == vector["error"]


def test_messages() -> None:
    for vector, message in zip(load()["messages"], EXAMPLES, strict=True):
        head = Head(Kind(vector["kind"]), 0, 0, vector["header"], 0)
        assert decode_message(head) == message
        assert packing.unpack_map(vector["header"], 8192) == vector["fields"]
        assert packing.pack(vector["fields"]) == vector["header"]


async def read_one(data: bytes) -> tuple[Head, bytes]:
    channel = Channel(BytesStream(data), Deadline.after(60))
    head = await channel.receive_head()
    return head, bytes(await channel.receive_bytes(head))


def test_frames() -> None:
    for vector in load()["frames"]:
        head, payload = run(read_one(vector["frame"]))
        assert (head.kind, head.header) == (vector["kind"], vector["header"])
        assert payload == vector["payload"]
    for vector in load()["frames_refused"]:
        with pytest.raises(getattr(frames, vector["error"])):
            asyncio.run(read_one(vector["frame"]))


def test_votes_and_payloads() -> None:
    vectors = load()
    assert verify_vote(vectors["vote"]["blob"]) == SIGNED_VOTE
    lists = vectors["payloads"]
    entries = payloads.unpack_records(lists["records"])
    assert [records.verify_record(*e, vectors["now_s"]).record for e in entries] == RECORDS
    assert unpack_votes(lists["votes"]) == [vectors["vote"]["blob"]]
    assert unpack_log(lists["log"]) == LOG
    assert unpack_updates(lists["updates"], 100) == [b"first", b"second one"]
    assert unpack_pin(vectors["pin"]["packed"]) == PIN
    shards = payloads.unpack_index(lists["index"], content_digest(lists["index"]))
    assert shards == [b"a" * 32, b"b" * 32]


def test_updates() -> None:
    vector = load()["update"]
    codec = UpdateCodec(vector["codec"], len(vector["quanta"]))
    where = (vector["block"], vector["round"], vector["sender"])
    assert codec.decode(vector["payload"], *where).dense().tolist() == vector["quanta"]


def test_the_spec_names_every_kind_field_and_code() -> None:
    spec = (PATH.parent / "SPEC.md").read_text()
    for kind in Kind:
        assert kind.name in spec
    for message in EXAMPLES:
        row = next(
            line for line in spec.splitlines() if line.startswith(f"| {message.KIND.name} |")
        )
        for field in dataclasses.fields(message):
            assert f"`{field.metadata['name']}`" in row
    for field in dataclasses.fields(Record):
        assert f"| `{field.metadata['name']}` |" in spec
    body = next(line for line in spec.splitlines() if line.startswith("Signed vote:"))
    for name in packing.unpack_map(SIGNED_VOTE.blob[SIGNED_AT:], 8192):
        assert f"`{name}`" in body
    for kind, limit in PAYLOAD_MAX_BYTES.items():
        if 64 <= kind < 96:
            continue  # test_protocol_serving.py
        row = next(line for line in spec.splitlines() if f", {kind.name} | 0, " in line)
        unit = "MiB" if limit % 2**20 == 0 else "KiB"
        assert row.endswith(f"| 0, {limit >> (20 if unit == 'MiB' else 10)} {unit} |")
    for code in ErrorCode:
        assert f"| {code.value} | {code.name.lower().replace('_', ' ')} |" in spec


if __name__ == "__main__":
    PATH.write_text(json.dumps(build(), indent=1) + "\n")
