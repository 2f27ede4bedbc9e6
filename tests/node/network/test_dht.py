"""The DHT's own parts, without a daemon: dictionaries, also of strangers, lookups, pings."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.network.dht import (
    PINGS_AT_ONCE,
    Lookup,
    RecordProtocol,
    node_id_of,
    pack_dictionary,
    unpack_dictionary,
)
from node.network.hivemind_parts import (
    DictionaryDHTValue,
    MSGPackSerializer,
    PeerID,
)
from protocol import records
from protocol.errors import WireError
from protocol.identity import new_identity
from protocol.limits import RECORDS_PER_KEY
from protocol.packing import Malformed
from tests.support.sealed_records import sealed

LONG = b"\xdd" + (19_800).to_bytes(4, "big")  # the beginning of a list of so many


@pytest.mark.parametrize(
    "data",
    [
        LONG * 4000,
        msgpack.packb(msgpack.ExtType(0x50, b"\x93" + LONG * 4000)),
        msgpack.packb(msgpack.ExtType(0x50, b"\x93\xc0\x01\x91\x93" + LONG * 4000)),
        msgpack.packb(msgpack.ExtType(0x50, b"\x93\xc0\x01\x91\x94\xc0\xc0\xc0" + LONG * 4000)),
    ],
)
def test_a_dictionary_of_nested_lists_takes_little_memory(data: bytes) -> None:
    """20 KB of lengths took 300 MB: a list is allocated when its length is read."""
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            unpack_dictionary(b"k" * 20, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_ping_under_way_is_held_and_their_number_is_bounded() -> None:
    """The loop holds its tasks weakly: a ping that nobody else holds may vanish unanswered."""

    async def main() -> None:
        pinged: list[Any] = []

        async def call_ping(peer: Any) -> None:
            await asyncio.get_running_loop().create_future()  # only the task itself holds it
            pinged.append(peer)

        crowded = PeerID(new_identity().peer_id)
        table = SimpleNamespace(add_or_update_node=lambda node, peer: (node_id_of(b""), crowded))
        protocol = SimpleNamespace(routing_table=table, call_ping=call_ping, pings=set())
        for _ in range(PINGS_AT_ONCE + 5):
            peer_id = new_identity().peer_id
            RecordProtocol._meet(protocol, node_id_of(peer_id), PeerID(peer_id))
        await asyncio.sleep(0)
        gc.collect()
        assert len(protocol.pings) == PINGS_AT_ONCE
        assert len(asyncio.all_tasks()) == PINGS_AT_ONCE + 1
        for task in list(protocol.pings):
            task.cancel()
        await asyncio.gather(*protocol.pings, return_exceptions=True)
        await asyncio.sleep(0)
        assert not protocol.pings

    asyncio.run(main())


def test_dictionaries_of_the_wire_are_hivemind_s_both_ways() -> None:
    some = [sealed(new_identity(), block=3) for _ in range(5)]
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
    peer_id = new_identity().peer_id
    assert node_id_of(peer_id) == node_id_of(bytes(peer_id))
    assert node_id_of(peer_id).to_bytes() == records.dht_key(peer_id)
