"""hivemind's Kademlia as a store of signed records, and of nothing else.

Decides what strangers can make this node hold or return: only verified records of our own runs,
in a `RecordTable` with a cap per key and in keys; plain values, whole dictionaries and cached
copies are refused. Decides who enters the routing table: a node's DHT id must be the hash of its
peer id, so that one identity is one place in the ring and nobody chooses its neighbourhood freely.
Knows nothing of blocks or rounds (`discovery.py`).

hivemind's own storage keeps whatever expires later, grows with every refused write, and drops a
whole answer for one bad entry; none of it is used. Its routing table and its wire format are.
Records are not handed over to nodes that join: their owners renew them within a round.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import zip_longest
from typing import Any

import msgpack

from node.network.hivemind_parts import (
    DHTID,
    DHTProtocol,
    DictionaryDHTValue,
    MSGPackSerializer,
    P2PContext,
    PeerID,
    dht_pb2,
)
from protocol.admission import RecordTable
from protocol.errors import WireError
from protocol.identity import public_key_of
from protocol.limits import (
    DHT_KEY_BYTES,
    PEER_ID_BYTES,
    RECORD_MAX_BYTES,
    RECORDS_PER_KEY,
    SIGNATURE_BYTES,
    TIME_MAX_S,
)
from protocol.packing import Malformed, blob, number, unpack_rows
from protocol.records import SignedRecord, subkey_of, verify_record

KEYS_PER_FIND = 8  # an answer of 8 x 75 KB stays far below p2pd's 4 MiB, beyond which it hangs
RECORDS_PER_STORE = 16
# A signature costs 110 us to check. A peer stores its own record once a round; who brings more
# than this is not listened to for a while.
STORES_BURST = 64
STORES_PER_S = 4.0
PEERS_METERED = 1024
PINGS_AT_ONCE = 32
CALL_S = 3.0
NEIGHBOURS = 20  # Kademlia's k
_DICTIONARY = 0x50  # hivemind's msgpack extension type for a dictionary value
_VALUE_MAX_BYTES = RECORDS_PER_KEY * (RECORD_MAX_BYTES + PEER_ID_BYTES + 32) + 64

Entry = tuple[bytes, bytes, bytes, float]  # key, subkey, value, expiration: a claim
Clock = Callable[[], float]


def node_id_of(peer_id: bytes) -> Any:
    """A peer's place in the ring."""
    return DHTID.from_bytes(hashlib.sha1(peer_id, usedforsecurity=False).digest())


class Lookup:
    """The claims that one lookup collects, from whom. Nothing is believed yet."""

    def __init__(self) -> None:
        self._answers: list[list[Entry]] = []

    def add(self, entries: list[Entry]) -> None:
        self._answers.append(entries)

    @property
    def answers(self) -> int:
        """How many have answered, be it with nothing."""
        return len(self._answers)

    def entries(self) -> Iterator[Entry]:
        """Each responder in turn: one that floods does not come before the others."""
        seen: set[Entry] = set()
        for row in zip_longest(*self._answers):
            for entry in row:
                if entry is not None and entry not in seen:
                    seen.add(entry)
                    yield entry


# Tasks inherit it: what hivemind's traversal finds for a caller lands in that caller's lookup.
current_lookup: ContextVar[Lookup | None] = ContextVar("current_lookup", default=None)


class RecordProtocol(DHTProtocol):  # type: ignore[misc]  # hivemind publishes no types
    """hivemind's RPCs on a `RecordTable`. The wire format and the RPC names stay hivemind's."""

    table: RecordTable
    clock: Clock
    allowances: dict[bytes, tuple[float, float]]
    count: Callable[[int, int], None]  # bytes in, bytes out: the ledger's estimate
    pings: set[asyncio.Task[Any]]  # under way; the loop alone would let them be collected

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return f"DHTProtocol.{method_name}"

    # --- what strangers ask ---------------------------------------------------------------------

    async def rpc_ping(
        self, request: dht_pb2.PingRequest, context: P2PContext
    ) -> dht_pb2.PingResponse:
        response = dht_pb2.PingResponse(peer=self.node_info, dht_time=self.clock())
        self._heard_from(request, context)
        self.count(request.ByteSize(), response.ByteSize())
        return response

    async def rpc_store(
        self, request: dht_pb2.StoreRequest, context: P2PContext
    ) -> dht_pb2.StoreResponse:
        self._heard_from(request, context)
        columns = request.keys, request.subkeys, request.values, request.expiration_time
        if len({len(column) for column in columns}) != 1 or len(request.keys) > RECORDS_PER_STORE:
            raise Malformed("a store request that is not aligned or too long")
        response = dht_pb2.StoreResponse(peer=self.node_info)
        allowed = self._allowance(context.remote_id.to_bytes(), len(request.keys))
        for place, row in enumerate(zip(*columns, strict=True)):
            response.store_ok.append(place < allowed and self.keep(*row))
        self.count(request.ByteSize(), response.ByteSize())
        return response

    async def rpc_find(
        self, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        self._heard_from(request, context)
        if len(request.keys) > KEYS_PER_FIND:
            raise Malformed("too many keys in one request")
        response = dht_pb2.FindResponse(peer=self.node_info)
        named = {node_id_of(context.remote_id.to_bytes())}  # the asker needs no address of its own
        for key in request.keys:
            if len(key) != DHT_KEY_BYTES:
                raise Malformed("not a DHT key")
            response.results.append(self._found(key, named))
        self.count(request.ByteSize(), response.ByteSize())
        return response

    def keep(self, key: bytes, subkey: bytes, value: bytes, expiration_s: float) -> bool:
        """Store a record if it is valid and there is a place for it."""
        now_s = self.clock()
        try:
            signed = verify_record(key, subkey, value, expiration_s, now_s)
        except WireError:
            return False
        return self.table.offer(signed, now_s).kept

    def _allowance(self, peer_id: bytes, wanted: int) -> int:
        """How many of its records we look at now: a bucket that refills."""
        now_s = time.monotonic()
        left, since_s = self.allowances.pop(peer_id, (float(STORES_BURST), now_s))
        left = min(left + (now_s - since_s) * STORES_PER_S, STORES_BURST)
        allowed = min(wanted, int(left))
        self.allowances[peer_id] = left - allowed, now_s
        if len(self.allowances) > PEERS_METERED:
            del self.allowances[next(iter(self.allowances))]
        return allowed

    def _found(self, key: bytes, named: set[Any]) -> Any:
        """Records and the nearest nodes, each node once in an answer: a walk takes them together.

        Eight keys of a block would otherwise carry the same neighbours eight times: most of what
        the DHT of a small swarm sends.
        """
        records = self.table.entries(key, self.clock())
        result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        if records:
            latest_s = max(signed.expiration_s for signed in records)
            result = dht_pb2.FindResult(
                type=dht_pb2.FOUND_DICTIONARY,
                value=pack_dictionary(records),
                expiration_time=latest_s,
            )
        near = self.routing_table.get_nearest_neighbors(DHTID.from_bytes(key), k=self.bucket_size)
        for node_id, peer in near:
            if node_id not in named:
                named.add(node_id)
                result.nearest_node_ids.append(node_id.to_bytes())
                result.nearest_peer_ids.append(peer.to_bytes())
        return result

    def _heard_from(self, request: Any, context: P2PContext) -> None:
        """The asker enters the routing table if it says that it is a node, under its own id."""
        peer_id = context.remote_id.to_bytes()
        if request.peer.node_id and request.peer.node_id == node_id_of(peer_id).to_bytes():
            self._meet(node_id_of(peer_id), context.remote_id)

    # --- what we ask ----------------------------------------------------------------------------

    async def call_find(self, peer: PeerID, keys: Any) -> dict[Any, Any] | None:
        """Neighbours for the traversal; records go to the current lookup, as claims."""
        keys = list(keys)
        request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys], peer=self.node_info)
        try:
            response = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
            self.count(response.ByteSize(), request.ByteSize())
            if len(response.results) != len(keys):
                raise Malformed("an answer that is not aligned with its keys")
            output = {key: (None, _neighbours(r)) for key, r in zip(keys, response.results)}  # noqa: B905
            claims = [_claims(key, r) for key, r in zip(keys, response.results)]  # noqa: B905
        except Exception:
            # Whatever a stranger's answer broke: it is no answer.
            await self.update_routing_table(None, peer, responded=False)
            return None
        if response.peer.node_id:
            self._meet(node_id_of(peer.to_bytes()), peer)
        lookup = current_lookup.get()
        if lookup is not None:
            lookup.add([entry for entries in claims for entry in entries])
        return output

    async def update_routing_table(
        self, node_id: Any, peer_id: PeerID, responded: bool = True
    ) -> None:
        expected = node_id_of(peer_id.to_bytes())
        if responded and node_id is not None:
            if node_id == expected:
                self._meet(expected, peer_id)
        elif expected in self.routing_table:
            del self.routing_table[expected]

    def _meet(self, node_id: Any, peer: PeerID) -> None:
        try:
            public_key_of(peer.to_bytes())
        except WireError:
            return  # not one of us: it could never own a record
        crowded_out = self.routing_table.add_or_update_node(node_id, peer)
        if crowded_out is not None and len(self.pings) < PINGS_AT_ONCE:
            # The bucket is full: its oldest member stays if it still answers (Kademlia, 2.2).
            task = asyncio.ensure_future(self.call_ping(crowded_out[1]))
            self.pings.add(task)
            task.add_done_callback(self.pings.discard)


def _neighbours(result: Any) -> dict[Any, Any]:
    """Node id -> peer id, as far as they belong together. At most as many as we would send."""
    found: dict[Any, Any] = {}
    for packed in result.nearest_peer_ids[:NEIGHBOURS]:
        try:
            public_key_of(packed)
        except WireError:
            continue
        found[node_id_of(packed)] = PeerID(packed)
    return found


def _claims(key: Any, result: Any) -> list[Entry]:
    if result.type != dht_pb2.FOUND_DICTIONARY:
        return []
    return unpack_dictionary(key.to_bytes(), result.value)


def pack_dictionary(records: list[SignedRecord]) -> bytes:
    """hivemind's form of a dictionary value."""
    dictionary = DictionaryDHTValue()
    with dictionary.freeze():
        for signed in records:
            dictionary.store(signed.peer_id, signed.value, signed.expiration_s)
        return bytes(MSGPackSerializer.dumps(dictionary))


def unpack_dictionary(key: bytes, data: bytes) -> list[Entry]:
    """The entries of a stranger's dictionary value. Bounded; nothing is believed yet."""
    if len(data) > _VALUE_MAX_BYTES:
        raise Malformed("a dictionary of more records than a key may have")
    try:
        # One extension value and nothing else: a list would be allocated by its length alone.
        outer = msgpack.unpackb(
            data, raw=False, max_map_len=0, max_array_len=0, max_str_len=0, max_bin_len=0
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        raise Malformed("not msgpack") from None
    if not isinstance(outer, msgpack.ExtType) or outer.code != _DICTIONARY:
        raise Malformed("not a dictionary")
    inner = msgpack.Unpacker(raw=False, max_buffer_size=_VALUE_MAX_BYTES)
    inner.feed(outer.data)
    try:
        if inner.read_array_header() != 3:
            raise Malformed("not a dictionary")
        inner.skip()  # the size limit that its sender had
        inner.skip()  # the latest expiration
    except (ValueError, msgpack.UnpackException):
        raise Malformed("not a dictionary") from None
    rows = unpack_rows(
        outer.data[inner.tell() :],
        _VALUE_MAX_BYTES,
        RECORDS_PER_KEY,
        blob(PEER_ID_BYTES, PEER_ID_BYTES),
        blob(SIGNATURE_BYTES, RECORD_MAX_BYTES),
        number(0, TIME_MAX_S),
    )
    return [(key, subkey_of(peer), value, expiration_s) for peer, value, expiration_s in rows]
