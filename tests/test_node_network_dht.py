"""The DHT's own parts, without a daemon: strangers' dictionaries, and pings that are not lost."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from node.network.dht import PINGS_AT_ONCE, RecordProtocol, node_id_of, unpack_dictionary
from node.network.hivemind_parts import PeerID
from protocol.identity import generate
from protocol.packing import Malformed

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

        crowded = PeerID(generate().peer_id)
        table = SimpleNamespace(add_or_update_node=lambda node, peer: (node_id_of(b""), crowded))
        protocol = SimpleNamespace(routing_table=table, call_ping=call_ping, pings=set())
        for _ in range(PINGS_AT_ONCE + 5):
            peer_id = generate().peer_id
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
