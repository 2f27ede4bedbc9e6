"""Records on a live DHT: announced ones are found, and kept where they belong."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from node.network.addresses import AddressError
from node.network.dht import Lookup, node_id_of
from node.network.discovery import Discovery, PeerBook, parse_seeds
from node.network.hivemind_parts import (
    PeerID,
    dht_pb2,
)
from node.network.ring import REPLICAS, STORES_PER_WALK
from protocol import messages, records
from protocol.admission import read_entries
from protocol.frames import Stalled, content_digest
from protocol.identity import new_identity
from protocol.ledger import Ledger
from protocol.limits import BLOCK_NONE, RECORD_MAX_BYTES
from protocol.payloads import unpack_records
from tests.support.loopback import RUN_FILE, RUN_ID, _no_daemon_left, node, pair, run, until  # noqa: F401
from tests.support.sealed_records import RECORD, sealed
from tests.support.strangers import log_of, many


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


def test_sequence_numbers_grow_over_restarts_and_addresses_fit() -> None:
    identity, now_s = new_identity(), 1_700_000_000.0
    first = Discovery(identity, RUN_ID, PeerBook(), Ledger(), lambda: now_s)
    numbers = [first.seal(RECORD).record.sequence for _ in range(3)]
    again = Discovery(identity, RUN_ID, PeerBook(), Ledger(), lambda: now_s + 1.0)
    numbers.append(again.seal(RECORD).record.sequence)
    assert numbers == sorted(set(numbers))
    relay = f"/ip6/2001:db8::1:2:3:4/tcp/40001/p2p/{new_identity().text}/p2p-circuit"
    record = dataclasses.replace(RECORD, consensus=RUN_ID, update=RUN_ID, update_bytes=10**9)
    signed = first.seal(dataclasses.replace(record, addresses=(relay,) * 4))
    assert 0 < len(signed.record.addresses) < 4
    assert len(signed.value) <= RECORD_MAX_BYTES


def test_seeds_are_whole_addresses() -> None:
    one = new_identity()
    texts = [f"/ip4/10.0.0.{n}/tcp/1/p2p/{one.text}" for n in (1, 2)]
    assert parse_seeds(texts) == {one.peer_id: ("/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/1")}
    with pytest.raises(AddressError):
        parse_seeds(["/ip4/10.0.0.1/tcp/1"])
    assert content_digest(RUN_FILE) == RUN_ID
