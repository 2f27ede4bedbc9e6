"""Who is in the run, and where: own record out, others' records in, addresses remembered.

Decides what is announced (addresses that fit, a sequence number that grows), which claims of a
lookup become records, and through whom a node joins again after it was cut off. Knows nothing of
what peers do with each other; the DHT itself is `dht.py`'s, the rules for records `protocol/`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from node.addresses import AddressError, in_order, split_peer, with_peer
from node.dht import Lookup
from node.gate import DaemonGone, Unreachable
from node.ring import Ring
from node.transport import Transport
from protocol import records
from protocol.admission import RecordTable, read_entries, select
from protocol.errors import WireError
from protocol.frames import Stalled
from protocol.identity import Identity
from protocol.ledger import Ledger
from protocol.limits import (
    ADDRESSES_PER_RECORD,
    BLOCK_NONE,
    RECORD_LIFE_MAX_S,
    RECORDS_PER_REPLY,
)
from protocol.records import Record, SignedRecord, dht_key, key_names

PEERS_REMEMBERED = 256
JOIN_THROUGH = 16  # cached peers that are tried at once
JOIN_S = 8.0  # for one of them
LOOKUP_S = 20.0
RECORD_LIFE_S = RECORD_LIFE_MAX_S / 3  # renewed every round; a vanished peer is soon forgotten
FRESH_S = 10.0  # a lookup for a stranger is not repeated within this
_BOOK_MAX_BYTES = 1024 * 1024


class PeerBook:
    """Addresses of peers that answered or have a verified record, the latest last. Bounded."""

    def __init__(self, path: Path | None = None) -> None:
        self._peers: dict[bytes, tuple[str, ...]] = {}
        if path is not None:
            self._load(path)

    def __len__(self) -> int:
        return len(self._peers)

    def remember(self, peer_id: bytes, known: Iterable[str]) -> None:
        fresh = tuple(in_order(known)[:ADDRESSES_PER_RECORD])
        if fresh:
            self._peers.pop(peer_id, None)
            self._peers[peer_id] = fresh
            if len(self._peers) > PEERS_REMEMBERED:
                del self._peers[next(iter(self._peers))]

    def addresses(self, peer_id: bytes) -> tuple[str, ...]:
        return self._peers.get(peer_id, ())

    def latest(self, count: int) -> list[tuple[bytes, tuple[str, ...]]]:
        return list(reversed(self._peers.items()))[:count]

    def to_bytes(self) -> bytes:
        """Kept, so that a node whose seed peer is gone for ever still finds the swarm."""
        lines = [[with_peer(a, peer) for a in known] for peer, known in self._peers.items()]
        return json.dumps(lines, indent=0).encode()

    def _load(self, path: Path) -> None:
        """A cache: what cannot be read is not there."""
        try:
            with open(path, "rb") as file:
                lines = json.loads(file.read(_BOOK_MAX_BYTES))
            for line in lines:
                found = [split_peer(str(text)) for text in line]
                self.remember(found[0][0], [address for _, address in found])
        except (OSError, ValueError, TypeError, IndexError, RecursionError, AddressError):
            return


class Discovery:
    """The records of one run as this node sees them. `attach` it to a daemon, then `join`."""

    def __init__(
        self,
        identity: Identity,
        run_id: bytes,
        book: PeerBook,
        ledger: Ledger,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run_id = run_id
        self.book = book
        self._identity = identity
        self._ledger = ledger
        self._clock = clock
        self._salt = secrets.token_bytes(16)  # nobody can grind identities that we prefer
        self._stored = RecordTable(frozenset({run_id}))  # for others, as a node of the DHT
        self._heard = RecordTable(frozenset({run_id}))  # verified ones from our own lookups
        self._looked_up: dict[int, float] = {}  # block -> when
        self._sequence = 0
        self._ring: Ring | None = None
        self._transport: Transport | None = None

    @property
    def ring(self) -> Ring:
        if self._ring is None:
            raise DaemonGone
        return self._ring

    @property
    def stored_records(self) -> int:
        return len(self._stored)

    async def attach(self, p2p: Any, transport: Transport) -> None:
        """Answer the DHT on a daemon that has just started. The records stay."""
        self._ring = await Ring.open(p2p, self._stored, self._estimate, self._clock)
        self._transport = transport

    def detach(self) -> None:
        self._ring = self._transport = None

    def _estimate(self, bytes_in: int, bytes_out: int) -> None:
        self._ledger.book_estimate("dht", bytes_in, bytes_out)

    # --- joining --------------------------------------------------------------------------------

    async def join(self, seeds: Iterable[tuple[bytes, tuple[str, ...]]] = ()) -> int:
        """Meet the seed peers and the latest cached ones; how many answered."""
        candidates = dict(self.book.latest(JOIN_THROUGH))
        candidates.update(seeds)
        candidates.pop(self._identity.peer_id, None)
        met = await asyncio.gather(*(self._meet(peer, known) for peer, known in candidates.items()))
        if any(met):
            own_place = dht_key(self._identity.peer_id)  # who is near us, and who else is there
            await self.ring.find([own_place], Lookup())
        return sum(met)

    async def _meet(self, peer_id: bytes, known: tuple[str, ...]) -> bool:
        ring, transport = self.ring, self._transport
        assert transport is not None
        try:
            async with asyncio.timeout(JOIN_S):
                await transport.connect(peer_id, known, JOIN_S)
                met = await ring.meet(peer_id)
        except (Unreachable, Stalled, DaemonGone, TimeoutError):
            return False
        if met:
            self.book.remember(peer_id, known)
        return met

    async def anyone_there(self) -> bool:
        """Whether some node of the routing table still answers. Silent ones leave it."""
        first, *others = self.ring.neighbours()[:JOIN_THROUGH] or [b""]
        if not first:
            return False
        ring = self.ring
        return await ring.meet(first) or any(
            await asyncio.gather(*(ring.meet(peer) for peer in others))
        )

    # --- own record -----------------------------------------------------------------------------

    def seal(self, record: Record) -> SignedRecord:
        """Sign a record of ours with the next sequence number; addresses that do not fit go."""
        now_s = self._clock()
        # Milliseconds since 1970: grows over restarts with no state to keep.
        self._sequence = max(self._sequence + 1, int(now_s * 1000))
        record = dataclasses.replace(record, run=self.run_id, sequence=self._sequence)
        while True:
            try:
                return records.seal(self._identity, record, now_s + RECORD_LIFE_S)
            except records.RecordOversize:
                if not record.addresses:
                    raise
                record = dataclasses.replace(record, addresses=record.addresses[:-1])

    async def announce(self, record: Record) -> int:
        """Publish our record; on how many nodes it is (0: nobody else will find us)."""
        signed = self.seal(record)
        self._heard.offer(signed, self._clock())
        async with _at_most(LOOKUP_S):
            return await self.ring.store(signed)

    # --- others' records ------------------------------------------------------------------------

    async def replicas(
        self, block: int, cap: int = RECORDS_PER_REPLY, seen_rounds: Mapping[bytes, int] = {}
    ) -> list[SignedRecord]:
        """Look a block's records up: verified, the newest of each peer, at most `cap`."""
        lookup = Lookup()
        keys = [dht_key(name) for name in key_names(self.run_id, block)]
        async with _at_most(LOOKUP_S):
            await self.ring.find(keys, lookup)
        now_s = self._clock()
        found = read_entries(lookup.entries(), now_s, cap, seen_rounds, self._salt)
        self._looked_up[block] = now_s
        for signed in found:
            self.learn(signed)
        return found

    def learn(self, signed: SignedRecord) -> None:
        """Remember a *verified* record and its peer's addresses."""
        self._heard.offer(signed, self._clock())
        if signed.peer_id != self._identity.peer_id:
            self.book.remember(signed.peer_id, signed.record.addresses)

    def known(self, block: int, cap: int) -> list[SignedRecord]:
        """Without asking anybody: of a block, or (BLOCK_NONE) of all that were looked up."""
        now_s = self._clock()
        blocks = {block} if block != BLOCK_NONE else {*self._looked_up, BLOCK_NONE}
        keys = [dht_key(name) for b in sorted(blocks) for name in key_names(self.run_id, b)]
        both = (t.entries(key, now_s) for key in keys for t in (self._heard, self._stored))
        return select((s for some in both for s in some), now_s, cap, {}, self._salt)

    async def for_stranger(self, block: int, cap: int) -> list[SignedRecord]:
        """For a PEERS_REQUEST. A stranger cannot make us look things up again and again."""
        now_s = self._clock()
        if (
            block != BLOCK_NONE
            and now_s - max(self._looked_up.values(), default=0.0) > 1.0
            and now_s - self._looked_up.get(block, 0.0) > FRESH_S
        ):
            self._looked_up[block] = now_s
            with contextlib.suppress(WireError):  # what is known will do
                await self.replicas(block)
        return self.known(block, cap)


@contextlib.asynccontextmanager
async def _at_most(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Stalled(f"the DHT did not answer within {seconds:g} s") from None


def parse_seeds(texts: Iterable[str]) -> dict[bytes, tuple[str, ...]]:
    """`--join`: whole multiaddresses, several of one peer allowed. Raises `AddressError`."""
    found: dict[bytes, tuple[str, ...]] = {}
    for text in texts:
        peer_id, address = split_peer(text)
        found[peer_id] = (*found.get(peer_id, ()), address)
    return found
