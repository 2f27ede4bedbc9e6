"""This node's place in the DHT: whom it knows, and the walks towards a key.

Decides whom a walk asks, how many at once, and when it has heard enough. Knows keys and nodes, not
what a record says; what one RPC asks and answers is `dht.py`'s.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from node.network.dht import (
    CALL_S,
    NEIGHBOURS,
    Clock,
    Lookup,
    RecordProtocol,
    current_lookup,
    node_id_of,
)
from node.network.hivemind_parts import DHTID, PeerID, dht_pb2
from protocol.admission import RecordTable
from protocol.records import SignedRecord

REPLICAS = 5  # nodes that are asked to store a record
WIDTH = 8  # nodes nearest to a key that a walk wants to hear: some more than hold a record
WALKERS = 6  # calls of one walk under way
STRAGGLER_S = 0.5
WALK_S = 12.0  # names of nodes that nobody is behind are free, and each costs a wait
STORE_OVERHEAD_BYTES = 120  # key, subkey, expiration, who we are: for the ledger's estimate
STORE_ANSWER_BYTES = 30
SILENT_S = 20.0  # a node that did not answer is left alone for so long
SILENT_PEERS = 1024
STORES_PER_WALK = 8  # a record goes onto the same nodes so often before they are looked up again


class Ring:
    """The routing table and the walks.

    The walk is ours: hivemind's leaves tasks behind when it is cancelled, and counts nodes that
    never answered among the nearest.
    """

    def __init__(self, protocol: RecordProtocol) -> None:
        self.protocol = protocol
        self._silent: dict[bytes, float] = {}  # peer -> until when it is not asked again
        self._near: tuple[bytes, list[bytes], int] = (b"", [], 0)  # key, who is near, stores left

    @classmethod
    async def open(
        cls, p2p: Any, table: RecordTable, count: Callable[[int, int], None], clock: Clock
    ) -> Ring:
        """Start to answer on a running daemon. Nobody is known yet: see `meet`."""
        node_id = node_id_of(p2p.peer_id.to_bytes())
        protocol = await RecordProtocol.create(
            p2p, node_id, NEIGHBOURS, 5, REPLICAS, CALL_S, client_mode=True
        )
        # As a client first: no request may come in before the table is there.
        protocol.table, protocol.clock, protocol.count = table, clock, count
        protocol.allowances, protocol.pings = {}, set()
        protocol.node_info = dht_pb2.NodeInfo(node_id=node_id.to_bytes())
        protocol.client_mode = False
        await protocol.add_p2p_handlers(p2p)
        return cls(protocol)

    @property
    def size(self) -> int:
        """How many nodes are in the routing table."""
        return len(self.protocol.routing_table.uid_to_peer_id)

    def neighbours(self) -> list[bytes]:
        return [peer.to_bytes() for peer in self.protocol.routing_table.peer_id_to_uid]

    async def meet(self, peer_id: bytes) -> bool:
        """Ping a peer; whether it answered as a node of the DHT. Both know each other then."""
        found = await self.protocol.call_ping(PeerID(peer_id), validate=False)
        return found is not None and found == node_id_of(peer_id)

    async def find(self, keys: list[bytes], lookup: Lookup) -> list[bytes]:
        """Walk towards the keys and collect their records' claims; who answered, nearest first."""
        token = current_lookup.set(lookup)
        try:
            answered = await self._walk([DHTID.from_bytes(key) for key in keys])
        finally:
            current_lookup.reset(token)
        now_s = self.protocol.clock()
        own = [s for key in keys for s in self.protocol.table.entries(key, now_s)]
        lookup.add([(s.key, s.subkey, s.value, s.expiration_s) for s in own])
        return answered

    async def store(self, signed: SignedRecord) -> int:
        """Put a record onto the nodes nearest to its key; how many took it.

        A node renews one record, twice a round: it walks now and then, or when a place was lost.
        """
        key = DHTID.from_bytes(signed.key)
        stored_key, answered, left = self._near
        if stored_key != signed.key or not left:
            answered, left = await self._walk([key]), STORES_PER_WALK
        mine = self.protocol.node_id.to_bytes()
        places = {node_id_of(peer): peer for peer in answered}
        near = sorted([*places, DHTID.from_bytes(mine)], key=key.xor_distance)[:REPLICAS]
        kept = 0
        if self.protocol.node_id in near:
            kept += self.protocol.keep(signed.key, signed.subkey, signed.value, signed.expiration_s)
        calls = [
            self.protocol.call_store(
                PeerID(places[node]), [key], [signed.value], signed.expiration_s, [signed.peer_id]
            )
            for node in near
            if node in places
        ]
        answers = await asyncio.gather(*calls)
        for answer in answers:
            kept += bool(answer and answer[0])
            self.protocol.count(STORE_ANSWER_BYTES, len(signed.value) + STORE_OVERHEAD_BYTES)
        lost = not calls or not all(answer and answer[0] for answer in answers)
        self._near = (signed.key, answered, 0 if lost else left - 1)
        return kept

    async def _walk(self, keys: list[Any]) -> list[bytes]:
        """Ask the nearest known nodes, learn nearer ones, until the nearest have all answered.

        After WALK_S it ends with those that have: whoever makes up neighbours delays it, no more.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + WALK_S
        table, own_id = self.protocol.routing_table, self.protocol.node_id
        known: dict[Any, Any] = {}
        for key in keys:
            known.update(table.get_nearest_neighbors(key, NEIGHBOURS, exclude=own_id))
        answered: list[Any] = []
        asked: set[Any] = set()
        calls: dict[asyncio.Task[Any], Any] = {}
        try:
            while True:
                for node in self._next(keys, known, asked)[: WALKERS - len(calls)]:
                    asked.add(node)
                    calls[asyncio.create_task(self.protocol.call_find(known[node], keys))] = node
                if not calls:
                    break
                # Enough have answered and only stragglers are left: they get a moment, not all.
                enough = len(answered) >= WIDTH and not self._next(keys, known, asked)
                patience_s = STRAGGLER_S if enough else CALL_S + 1.0
                patience_s = min(patience_s, ends_s - loop.time())
                if patience_s <= 0:
                    break
                done, _ = await asyncio.wait(
                    calls, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    node, answer = calls.pop(task), task.result()
                    if answer is None:
                        self._remember_silent(known.pop(node).to_bytes())
                        continue
                    answered.append(node)
                    for _, near in answer.values():
                        known.update({n: p for n, p in near.items() if n != own_id})
        finally:
            for task in calls:
                task.cancel()
            if calls:
                await asyncio.gather(*calls, return_exceptions=True)
        answered.sort(key=lambda node: min(key.xor_distance(node) for key in keys))
        return [known[node].to_bytes() for node in answered]

    def _next(self, keys: list[Any], known: dict[Any, Any], asked: set[Any]) -> list[Any]:
        """Nodes among the nearest of some key that were not asked yet, in turns over the keys."""
        now_s = self.protocol.clock()
        usable = [
            node
            for node, peer in known.items()
            if node in asked or self._silent.get(peer.to_bytes(), 0.0) <= now_s
        ]
        rows = (heapq.nsmallest(WIDTH, usable, key=key.xor_distance) for key in keys)
        turns = (node for row in zip_longest(*rows) for node in row if node is not None)
        return [node for node in dict.fromkeys(turns) if node not in asked]

    def _remember_silent(self, peer_id: bytes) -> None:
        now_s = self.protocol.clock()
        if len(self._silent) >= SILENT_PEERS:
            self._silent = {p: until for p, until in self._silent.items() if until > now_s}
        if len(self._silent) < SILENT_PEERS:
            self._silent[peer_id] = now_s + SILENT_S
