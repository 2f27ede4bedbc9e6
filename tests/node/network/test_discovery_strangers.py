"""Records on a live DHT that somebody forged, hides or floods it with."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from node.network.dht import STORES_BURST, pack_dictionary
from node.network.discovery import parse_seeds
from node.network.hivemind_parts import (
    DHTID,
    DictionaryDHTValue,
    MSGPackSerializer,
    PeerID,
    dht_pb2,
)
from protocol import records
from protocol.admission import RecordTable
from protocol.frames import content_digest
from protocol.identity import new_identity
from protocol.limits import RECORD_LIFE_MAX_S, RECORD_MAX_BYTES, RECORDS_PER_KEY
from protocol.records import SignedRecord
from tests.support.loopback import RUN_ID, _no_daemon_left, node, pair, run  # noqa: F401
from tests.support.sealed_records import RECORD, sealed, store_raw


def test_forged_records_are_refused_by_live_nodes(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (storer, attacker):
            await storer.announce(RECORD)
            held = storer.discovery.stored_records
            victim, me = new_identity(), attacker.identity
            good = sealed(victim)
            args = good.key, good.subkey, good.value, good.expiration_s

            async def refused(*changed: Any) -> bool:
                return not await store_raw(attacker, storer, *changed)

            mine = sealed(me)
            # another's subkey with my signature, and with my whole record
            body = records.body_of(good.value)
            forged = records.sign_body(me, good.key, good.subkey, body, good.expiration_s)
            assert await refused(good.key, good.subkey, forged, good.expiration_s)
            assert await refused(mine.key, good.subkey, mine.value, mine.expiration_s)
            # a plain value, which would wipe the dictionary
            plain = records.sign_body(me, good.key, b"\xc0", body, good.expiration_s)
            assert await refused(good.key, b"\xc0", plain, good.expiration_s)
            # whole dictionaries, however large
            many = pack_dictionary([sealed(new_identity()) for _ in range(50)])
            assert await refused(good.key, b"", many, good.expiration_s)
            huge = DictionaryDHTValue()
            for number in range(20_000):
                huge.store(number, b"", time.time() + 100)
            assert await refused(good.key, b"", MSGPackSerializer.dumps(huge), time.time() + 100)
            # changed value, key, expiration
            assert await refused(good.key, good.subkey, good.value[:-1] + b"?", good.expiration_s)
            other_key = records.dht_key(records.key_name(RUN_ID, 2, 0))
            assert await refused(other_key, good.subkey, good.value, good.expiration_s)
            assert await refused(b"\x01" * 20, good.subkey, good.value, good.expiration_s)
            assert await refused(good.key, good.subkey, good.value, good.expiration_s + 50)
            # a life that is too long, and one that is over
            long = sealed(victim, RECORD_LIFE_MAX_S + 60)
            assert await refused(long.key, long.subkey, long.value, long.expiration_s)
            past = sealed(victim, -60)
            assert await refused(past.key, past.subkey, past.value, past.expiration_s)
            assert await refused(good.key, good.subkey, good.value, float("nan"))
            # another run, under its own proper key
            foreign = sealed(victim, run=content_digest(b"another"))
            assert await refused(foreign.key, foreign.subkey, foreign.value, foreign.expiration_s)
            # bytes that are no record at all
            assert await refused(good.key, good.subkey, b"\x00" * 200, good.expiration_s)
            assert await refused(good.key, good.subkey, b"\x00" * (RECORD_MAX_BYTES + 1), 1.0)
            assert storer.discovery.stored_records == held

            assert not await refused(*args)  # the true one, brought by anybody, is taken
            newer = sealed(victim, sequence=6)
            assert not await refused(newer.key, newer.subkey, newer.value, newer.expiration_s)
            assert await refused(*args)  # replayed
            # replayed with a later expiration than the newer one has: needs the owner's key
            later = sealed(victim, life_s=300.0, sequence=5)
            assert await refused(later.key, later.subkey, later.value, later.expiration_s)
            found = {s.peer_id: s.record.sequence for s in await attacker.replicas(1)}
            assert found[victim.peer_id] == 6

    run(main())


def test_requests_beyond_the_limits_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            protocol = b.discovery.ring.protocol
            stub = protocol.get_stub(PeerID(a.peer_id))
            good = sealed(new_identity())
            columns = {
                "keys": [good.key] * 17,
                "subkeys": [good.subkey] * 17,
                "values": [good.value] * 17,
                "expiration_time": [good.expiration_s] * 17,
            }
            for request in (
                dht_pb2.StoreRequest(**columns),
                dht_pb2.StoreRequest(keys=[good.key], subkeys=[], values=[], expiration_time=[]),
            ):
                with pytest.raises(Exception, match="store request"):
                    await stub.rpc_store(request, timeout=5.0)
            for keys in ([good.key] * 9, [b"short"]):
                with pytest.raises(Exception, match="key"):
                    await stub.rpc_find(dht_pb2.FindRequest(keys=keys), timeout=5.0)
            # a node that claims a place in the ring which is not its own does not get it
            ring = a.discovery.ring
            size = ring.size
            liar = dht_pb2.NodeInfo(node_id=DHTID.generate().to_bytes())
            await stub.rpc_ping(dht_pb2.PingRequest(peer=liar), timeout=5.0)
            await stub.rpc_find(dht_pb2.FindRequest(keys=[good.key], peer=liar), timeout=5.0)
            assert ring.size == size == 1
            assert ring.neighbours() == [b.peer_id]

    run(main())


class LyingTable(RecordTable):
    """A storing node that returns whatever it likes."""

    def __init__(self, lies: list[SignedRecord]) -> None:
        super().__init__()
        self.lies = lies

    def entries(self, key: bytes, now_s: float) -> list[SignedRecord]:
        return [dataclasses.replace(lie, key=key) for lie in self.lies]


def test_a_lying_storer_cannot_hide_or_forge_records(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (honest, liar):
            await honest.announce(RECORD)
            true = (await liar.replicas(1))[0]
            # the true record's subkey with a later, forged content, and plenty of noise
            forged = dataclasses.replace(
                true, value=true.value[:-64] + bytes(64), expiration_s=true.expiration_s + 100
            )
            noise = [
                dataclasses.replace(sealed(new_identity()), value=b"\x80" * 400) for _ in range(90)
            ]
            liar.discovery.ring.protocol.table = LyingTable([forged, *noise])
            async with node(tmp_path, "reader", await liar.invitations()) as reader:
                await reader.discovery.join(parse_seeds(await honest.invitations()).items())
                found = await reader.replicas(1)
                assert [(s.peer_id, s.value) for s in found] == [(honest.peer_id, true.value)]

    run(main())


def test_a_flood_of_identities_is_bounded_and_earlier_peers_stay(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (storer, attacker):
            await storer.announce(dataclasses.replace(RECORD, addresses=("/ip4/10.1.0.1/tcp/1",)))
            await attacker.announce(dataclasses.replace(RECORD, addresses=("/ip4/10.2.0.1/tcp/1",)))
            protocol = attacker.discovery.ring.protocol
            stub = protocol.get_stub(PeerID(storer.peer_id))
            flood = [
                sealed(new_identity(), addresses=("/ip4/10.3.0.1/tcp/1",)) for _ in range(1200)
            ]
            for start in range(0, len(flood), 16):
                some = flood[start : start + 16]
                request = dht_pb2.StoreRequest(
                    keys=[s.key for s in some],
                    subkeys=[s.subkey for s in some],
                    values=[s.value for s in some],
                    expiration_time=[s.expiration_s for s in some],
                    peer=protocol.node_info,
                )
                await stub.rpc_store(request, timeout=10.0)
            # one peer brings no more than its allowance ...
            assert storer.discovery.stored_records <= STORES_BURST + 40
            # ... and many peers no more than the table takes
            for signed in flood:
                storing = storer.discovery.ring.protocol
                storing.keep(signed.key, signed.subkey, signed.value, signed.expiration_s)
            assert storer.discovery.stored_records == 4 * RECORDS_PER_KEY
            began_s = time.monotonic()
            found = await attacker.replicas(1, cap=16)
            assert time.monotonic() - began_s < 3.0
            assert len(found) == 16
            assert {storer.peer_id, attacker.peer_id} <= {s.peer_id for s in found}
            assert len(attacker.discovery.book) <= 256

    run(main())
