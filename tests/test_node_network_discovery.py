"""Records on a live DHT: announced ones are found, forged ones refused, floods bounded."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import RUN_FILE, RUN_ID, _no_daemon_left, node, pair, run, until  # noqa: F401
from strangers import log_of, many

from node.network.addresses import AddressError
from node.network.dht import STORES_BURST, Lookup, node_id_of, pack_dictionary, unpack_dictionary
from node.network.discovery import Discovery, PeerBook, parse_seeds
from node.network.hivemind_parts import (
    DHTID,
    DictionaryDHTValue,
    MSGPackSerializer,
    PeerID,
    dht_pb2,
)
from node.network.network import Network
from node.network.ring import REPLICAS, STORES_PER_WALK
from protocol import messages, records
from protocol.admission import RecordTable, read_entries
from protocol.errors import WireError
from protocol.frames import Stalled, content_digest
from protocol.identity import Identity, generate
from protocol.ledger import Ledger
from protocol.limits import BLOCK_NONE, RECORD_LIFE_MAX_S, RECORD_MAX_BYTES, RECORDS_PER_KEY
from protocol.payloads import unpack_records
from protocol.records import Record, Role, SignedRecord

RECORD = Record(run=RUN_ID, role=Role.REPLICA, block=1, round=1, sequence=0)


def sealed(identity: Identity, life_s: float = 100.0, **changes: Any) -> SignedRecord:
    values: dict[str, Any] = {"sequence": 5, "addresses": ("/ip4/127.0.0.1/tcp/1",), **changes}
    return records.seal(identity, dataclasses.replace(RECORD, **values), time.time() + life_s)


async def store_raw(
    asker: Network, storer: Network, key: bytes, subkey: bytes, value: bytes, expiration_s: float
) -> bool:
    """A store request as a hostile peer would write it. Refused: False or no answer at all."""
    protocol = asker.discovery.ring.protocol
    request = dht_pb2.StoreRequest(
        keys=[key],
        subkeys=[subkey],
        values=[value],
        expiration_time=[expiration_s],
        in_cache=[False],
        peer=protocol.node_info,
    )
    try:
        stub = protocol.get_stub(PeerID(storer.peer_id))
        response = await stub.rpc_store(request, timeout=5.0)
    except Exception:
        return False
    return bool(response.store_ok[0])


# --- announcing and finding ---------------------------------------------------------------------


def test_what_one_node_announces_another_finds(tmp_path: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            seed = await enter(node(tmp_path, "seed"))
            join = await seed.invitations()
            others = [await enter(node(tmp_path, f"n{i}", join)) for i in range(3)]
            swarm = [seed, *others]
            copies = [
                await n.announce(dataclasses.replace(RECORD, round=i)) for i, n in enumerate(swarm)
            ]
            assert all(2 <= count <= REPLICAS for count in copies)
            for reader in swarm:
                found = await reader.replicas(1)
                assert {s.peer_id: s.record.round for s in found} == {
                    n.peer_id: i for i, n in enumerate(swarm)
                }
                assert all(s.record.addresses for s in found)
            assert await others[0].replicas(2) == []  # another block
            # a renewal replaces, and the newest is what everybody sees
            await others[1].announce(dataclasses.replace(RECORD, round=9))
            rounds = {s.peer_id: s.record.round for s in await others[2].replicas(1)}
            assert rounds[others[1].peer_id] == 9 and len(rounds) == 4
            # the ids of peers that were never dialled are enough: p2pd finds their addresses
            assert others[0].discovery.ring.size == 3
            pong = await others[0].request(others[2].peer_id, messages.Ping(), messages.Pong)
            assert pong.message
            # over our own streams, for those without a DHT
            answer = await others[0].request(
                seed.peer_id, messages.PeersRequest(run=RUN_ID, block=1), messages.PeersReply
            )
            claims = unpack_records(answer.payload)
            verified = read_entries(claims, time.time(), 512, {})
            assert {s.peer_id for s in verified} == {n.peer_id for n in swarm}
            answer = await others[0].request(
                seed.peer_id,
                messages.PeersRequest(run=RUN_ID, block=BLOCK_NONE),
                messages.PeersReply,
            )
            assert answer.message.count == 4
            # the swarm goes on without its seed, and lets newcomers in
            await seed.stop()
            late = await enter(node(tmp_path, "late", await others[0].invitations()))
            assert len(await late.replicas(1)) == 4
            estimates = late.ledger.estimates()["dht"]
            assert estimates.bytes_in > 0 and estimates.bytes_out > 0

    run(main())


def test_a_cancelled_lookup_leaves_no_task(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            await a.announce(RECORD)
            before = len(asyncio.all_tasks())
            for turns in range(8):
                task = asyncio.create_task(b.replicas(1))
                for _ in range(turns):
                    await asyncio.sleep(0)  # cancelled after none, one, two ... of its turns
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await until(lambda: len(asyncio.all_tasks()) <= before)
            assert len(await b.replicas(1)) == 1

    run(main())


def test_a_lookup_that_takes_too_long_has_found_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.network.discovery.LOOKUP_S", 1.0)

    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            await a.announce(RECORD)
            ring = b.discovery.ring
            find = ring.find

            async def endless(keys: list[bytes], lookup: Lookup) -> list[bytes]:
                await find(keys, lookup)  # the honest ones answer, then come names of nobody
                await asyncio.sleep(60)
                return []

            monkeypatch.setattr(ring, "find", endless)
            assert [s.peer_id for s in await b.replicas(1)] == [a.peer_id]
            assert await b.replicas(2) == []  # answered, by nothing
            # Joining is not held up by it either.
            async with asyncio.timeout(15.0):
                assert await b.discovery.join(parse_seeds(await a.invitations()).items()) == 1

            async def silent(keys: list[bytes], lookup: Lookup) -> list[bytes]:
                await asyncio.sleep(60)
                return []

            monkeypatch.setattr(ring, "find", silent)
            with pytest.raises(Stalled):
                await b.replicas(1)

    run(main())


def test_made_up_neighbours_delay_a_walk_and_hide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.network.ring.WALK_S", 1.0)

    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            await a.announce(RECORD)
            protocol = b.discovery.ring.protocol
            call = protocol.call_find
            made_up = {node_id_of(p.peer_id): PeerID(p.peer_id) for p in many(60)}

            async def find(peer: PeerID, keys: Any) -> Any:
                if peer in made_up.values():
                    await asyncio.sleep(1.0)  # a little at a time: there is always news to wait for
                    return None
                answer = await call(peer, keys)
                return {key: (None, {**near, **made_up}) for key, (_, near) in answer.items()}

            protocol.call_find = find
            async with asyncio.timeout(6.0):  # all of them would take 10 s
                assert [s.peer_id for s in await b.replicas(1)] == [a.peer_id]
            async with asyncio.timeout(6.0):
                assert await b.announce(RECORD) == 2  # our own record is not kept out either

    run(main())


def test_contributors_of_a_block_come_first_in_its_lookup(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            worker, strangers = many(1)[0], many(40)
            for peer in [*strangers, worker]:
                b.discovery.ring.protocol.table.offer(sealed(peer), time.time())
            found = [s.peer_id for s in await a.replicas(1, cap=8)]
            assert len(found) == 8
            a.standings.works_on(0, {0: None, 1: log_of([worker])}.get)
            found = [s.peer_id for s in await a.replicas(1, cap=8)]
            assert found[0] == worker.peer_id and len(found) == 8
            assert a.discovery.known(1, 8)[0].peer_id == worker.peer_id  # what strangers are told

    run(main())


def test_a_record_is_renewed_without_a_walk_until_a_place_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            ring, walks = a.discovery.ring, []
            walk = ring._walk

            async def counted(keys: list[Any]) -> list[bytes]:
                walks.append(keys)
                return await walk(keys)

            # In the method's place, which mypy forbids: no figure tells of walks.
            ring._walk = counted  # type: ignore[method-assign]
            for _ in range(STORES_PER_WALK):
                assert await a.announce(RECORD) == 2
            assert len(walks) == 1
            assert await a.announce(RECORD) == 2 and len(walks) == 2
            await b.stop()
            assert await a.announce(RECORD) == 1 and len(walks) == 2
            assert await a.announce(RECORD) == 1 and len(walks) == 3

    run(main())


def test_an_answer_names_a_node_once(tmp_path: Path) -> None:
    """However many keys are asked for: neighbours were most of what a small swarm's DHT sent."""

    async def main() -> None:
        async with pair(tmp_path) as (a, b), node(tmp_path, "c", await a.invitations()) as c:
            asked = PeerID(a.peer_id)
            stub = b.discovery.ring.protocol.get_stub(asked)
            keys = [records.dht_key(name) for name in records.key_names(RUN_ID, 1)]
            response = await stub.rpc_find(dht_pb2.FindRequest(keys=keys), timeout=5.0)
            named = [peer for result in response.results for peer in result.nearest_peer_ids]
            assert len(response.results) == len(keys) and named == [c.peer_id]

    run(main())


# --- forgeries ----------------------------------------------------------------------------------


def test_forged_records_are_refused_by_live_nodes(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (storer, attacker):
            await storer.announce(RECORD)
            held = storer.discovery.stored_records
            victim, me = generate(), attacker.identity
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
            many = pack_dictionary([sealed(generate()) for _ in range(50)])
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
            good = sealed(generate())
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
                dataclasses.replace(sealed(generate()), value=b"\x80" * 400) for _ in range(90)
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
            flood = [sealed(generate(), addresses=("/ip4/10.3.0.1/tcp/1",)) for _ in range(1200)]
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


# --- parts --------------------------------------------------------------------------------------


def test_dictionaries_of_the_wire_are_hivemind_s_both_ways() -> None:
    some = [sealed(generate(), block=3) for _ in range(5)]
    packed = pack_dictionary(some)
    theirs = MSGPackSerializer.loads(packed)
    assert isinstance(theirs, DictionaryDHTValue)
    assert {key: tuple(item) for key, item in theirs.items()} == {
        s.peer_id: (s.value, s.expiration_s) for s in some
    }
    assert unpack_dictionary(b"k" * 20, packed) == [
        (b"k" * 20, s.subkey, s.value, s.expiration_s) for s in some
    ]


@given(st.binary(max_size=200))
def test_a_stranger_s_dictionary_is_refused_or_read(data: bytes) -> None:
    for candidate in (data, bytes(msgpack.packb(msgpack.ExtType(0x50, data)))):
        with contextlib.suppress(WireError):
            unpack_dictionary(b"k" * 20, candidate)


@pytest.mark.parametrize(
    "inner",
    [
        [None, 1.0],
        [None, 1.0, [[b"x" * 38, b"y" * 64]]],
        [None, 1.0, [[b"x" * 37, b"y" * 64, 1.0]]],
        [None, 1.0, [[b"x" * 38, b"y" * 513, 1.0]]],
        [None, 1.0, [[b"x" * 38, b"y" * 64, float("inf")]]],
        [None, 1.0, [[b"x" * 38, b"y" * 64, 1.0]] * (RECORDS_PER_KEY + 1)],
        [None, 1.0, [[]] * 1000],
        {"a": 1},
    ],
)
def test_malformed_dictionaries_are_refused(inner: object) -> None:
    data = msgpack.packb(msgpack.ExtType(0x50, msgpack.packb(inner)))
    with pytest.raises(WireError):
        unpack_dictionary(b"k" * 20, data)
    with pytest.raises(WireError):
        unpack_dictionary(b"k" * 20, b"\xc1" * 200_000)


def test_a_lookup_takes_turns_over_its_responders() -> None:
    lookup = Lookup()
    many = [(b"k", bytes([n]), b"v", 1.0) for n in range(100)]
    lookup.add(many)
    lookup.add([(b"k", b"honest", b"v", 1.0), many[0]])
    order = [entry[1] for entry in lookup.entries()]
    assert order.index(b"honest") == 1 and len(order) == 101


def test_a_place_in_the_ring_is_the_hash_of_the_identity() -> None:
    peer_id = generate().peer_id
    assert node_id_of(peer_id) == node_id_of(bytes(peer_id))
    assert node_id_of(peer_id).to_bytes() == records.dht_key(peer_id)


def test_sequence_numbers_grow_over_restarts_and_addresses_fit() -> None:
    identity, now_s = generate(), 1_700_000_000.0
    first = Discovery(identity, RUN_ID, PeerBook(), Ledger(), lambda: now_s)
    numbers = [first.seal(RECORD).record.sequence for _ in range(3)]
    again = Discovery(identity, RUN_ID, PeerBook(), Ledger(), lambda: now_s + 1.0)
    numbers.append(again.seal(RECORD).record.sequence)
    assert numbers == sorted(set(numbers))
    relay = f"/ip6/2001:db8::1:2:3:4/tcp/40001/p2p/{generate().text}/p2p-circuit"
    record = dataclasses.replace(RECORD, consensus=RUN_ID, update=RUN_ID, update_bytes=10**9)
    signed = first.seal(dataclasses.replace(record, addresses=(relay,) * 4))
    assert 0 < len(signed.record.addresses) < 4
    assert len(signed.value) <= RECORD_MAX_BYTES


def test_seeds_are_whole_addresses() -> None:
    one = generate()
    texts = [f"/ip4/10.0.0.{n}/tcp/1/p2p/{one.text}" for n in (1, 2)]
    assert parse_seeds(texts) == {one.peer_id: ("/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/1")}
    with pytest.raises(AddressError):
        parse_seeds(["/ip4/10.0.0.1/tcp/1"])
    assert content_digest(RUN_FILE) == RUN_ID
