"""Who is in the run, and where: own record out, others' records in, addresses remembered.

Decides what is announced (addresses that fit, a sequence number that grows), which claims of a
lookup become records, and through whom a node joins again after it was cut off. Knows nothing of
what peers do with each other; the DHT itself is `dht.py`'s, the rules for records `protocol/`'s,
how well a peer is known `standing`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from node.network.addresses import AddressError, in_order, split_peer, with_peer
from node.network.dht import Lookup
from node.network.gate import DaemonGone, Unreachable
from node.network.ring import Ring
from node.network.standing import Standing, Standings
from node.network.transport import Transport
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
SALT_BYTES = 16
JOIN_THROUGH = 16  # cached peers that are tried at once
JOIN_S = 8.0  # for one of them
LOOKUP_S = 20.0
RECORD_LIFE_S = RECORD_LIFE_MAX_S / 3  # renewed every round; a vanished peer is soon forgotten
FRESH_S = 10.0  # a lookup for a stranger is not repeated within this
_BOOK_MAX_BYTES = 1024 * 1024


class PeerBook:
    """Addresses of peers that answered or have a verified record, the latest last.

    Bounded: of those with the least standing the oldest goes first, so that no flood of hearsay
    takes the place of a peer that we have met.
    """

    def __init__(self, path: Path | None = None, standings: Standings | None = None) -> None:
        self.standings = standings or Standings()
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
                del self._peers[self._least()]

    def _least(self) -> bytes:
        of = self.standings.of
        return next(peer for standing in Standing for peer in self._peers if of(peer) is standing)

    def addresses(self, peer_id: bytes) -> tuple[str, ...]:
        return self._peers.get(peer_id, ())

    def latest(self, count: int) -> list[tuple[bytes, tuple[str, ...]]]:
        """Those of the best standing first; among equals the latest."""
        newest_first = reversed(self._peers.items())
        return sorted(newest_first, key=lambda entry: -self.standings.of(entry[0]))[:count]

    def trusted(self, count: int) -> list[bytes]:
        """Whose word about us (our clock, our address) we ask for, the best first.

        Contributors, and no more others than them: together with us they are not outnumbered.
        Before there are any, whoever has spoken to us; hearsay only as long as there is nobody.
        """
        ranked = [(self.standings.of(peer), peer) for peer, _ in self.latest(len(self))]
        known = [peer for standing, peer in ranked if standing is Standing.CONTRIBUTOR]
        met = [peer for standing, peer in ranked if standing is Standing.SPOKE]
        if known:
            return (known + met[: len(known)])[:count]
        return (met or [peer for _, peer in ranked])[:count]

    def met(self, count: int) -> list[bytes]:
        """Who has spoken to us: contributors first, then the latest."""
        of = self.standings.of
        return [peer for peer, _ in self.latest(count) if of(peer) > Standing.HEARSAY]

    def to_bytes(self) -> bytes:
        """Kept, so that a node whose seed peer is gone for ever still finds the swarm."""
        kept: dict[str, list[list[str]]] = {"heard": [], "met": []}
        for peer, known in self._peers.items():
            tier = "met" if self.standings.of(peer) > Standing.HEARSAY else "heard"
            kept[tier].append([with_peer(address, peer) for address in known])
        return json.dumps(kept, indent=0).encode()

    def _load(self, path: Path) -> None:
        """A cache: what cannot be read is not there."""
        try:
            with open(path, "rb") as file:
                kept = json.loads(file.read(_BOOK_MAX_BYTES))
            for tier in ("heard", "met"):
                for line in kept[tier]:
                    found = [split_peer(str(text)) for text in line]
                    if tier == "met":
                        self.standings.spoke(found[0][0])
                    self.remember(found[0][0], [address for _, address in found])
        except (OSError, ValueError, TypeError, LookupError, RecursionError, AddressError):
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
        blocks: int | None = None,  # of the run, if that is known
        salt: bytes | None = None,
    ) -> None:
        self.run_id = run_id
        self.book, self.standings = book, book.standings
        self._identity = identity
        self._ledger = ledger
        self._clock = clock
        # Nobody can grind identities that we prefer.
        self._salt = salt or secrets.token_bytes(SALT_BYTES)
        runs = frozenset({run_id})
        self._stored = RecordTable(runs, blocks=blocks)  # for others, as a node of the DHT
        self._heard = RecordTable(runs, blocks=blocks)  # verified ones from our own lookups
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
        self.use(await Ring.open(p2p, self._stored, self._estimate, self._clock), transport)

    def use(self, ring: Ring, transport: Transport) -> None:
        """Look up and announce through these."""
        self._ring, self._transport = ring, transport

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
            # Nodes that do not answer may lengthen this walk; who was met by then will do.
            with contextlib.suppress(Stalled):
                async with _at_most(LOOKUP_S):
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
            self.standings.spoke(peer_id)
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

    async def replicas(self, block: int, cap: int = RECORDS_PER_REPLY) -> list[SignedRecord]:
        """Look a block's records up: verified, the newest of each peer, at most `cap`.

        Peers that contributed to the block, as far as we have its log, come first. A walk that
        takes too long (names of nodes are free, each costs a wait) ends with what it has found;
        raises `Stalled` only if nobody has answered.
        """
        lookup = Lookup()
        keys = [dht_key(name) for name in key_names(self.run_id, block)]
        try:
            async with _at_most(LOOKUP_S):
                await self.ring.find(keys, lookup)
        except Stalled:
            if not lookup.answers:
                raise
            own = [s for key in keys for s in self._stored.entries(key, self._clock())]
            lookup.add([(s.key, s.subkey, s.value, s.expiration_s) for s in own])
        now_s = self._clock()
        seen = self.standings.seen_rounds(block)
        found = read_entries(lookup.entries(), now_s, cap, seen, self._salt)
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
        seen = self.standings.seen_rounds(block)
        return select((s for some in both for s in some), now_s, cap, seen, self._salt)

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
