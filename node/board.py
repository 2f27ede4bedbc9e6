"""A replica's notice board: its record in the DHT and shown to peers, theirs heard from both.

The DHT finds replicas that one has not met; those that one has met are shown the record directly,
which takes one round trip instead of a walk. Knows nothing of what a record leads to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from node.fetch import Peers
from node.network import Network
from node.replica import record_event
from protocol import messages
from protocol.errors import WireError
from protocol.identity import peer_text
from protocol.limits import RECORDS_PER_REPLY
from protocol.payloads import announce_of, unpack_records
from protocol.records import Record, SignedRecord, verify
from swarm import actions as act

SHOW_S = 5.0
PEERS_SHOWN = 64


class ReplicaBoard:
    """Publishes for one replica and hears for it."""

    def __init__(
        self,
        network: Network,
        peers: Peers,
        block: int,
        role: int,
        on_record: Callable[[act.PeerRecord], None],
    ) -> None:
        self.network, self.peers, self.block, self.role = network, peers, block, role
        self.on_record = on_record
        self._own: SignedRecord | None = None
        self._met: dict[bytes, SignedRecord] = {}  # the newest record of each replica

    async def publish(self, announcement: act.Announce) -> None:
        """Show our record to the replicas that we know, then put it into the DHT."""
        update = announcement.update
        record = Record(
            run=self.network.settings.run_id,
            role=self.role,
            block=self.block,
            round=max(announcement.round, 0),
            sequence=0,  # the network numbers and signs it
            consensus=announcement.head,
            head_round=announcement.head_round + 1,
            update=update.digest if update else b"",
            update_bytes=announcement.size_bytes,
            proposal_ms=round(announcement.proposal_s * 1000),
            addresses=await self.network.addresses(),
        )
        self._own = self.network.discovery.seal(record)
        shown = list(self._met)[:PEERS_SHOWN]
        await asyncio.gather(*(self._show(peer, self._own) for peer in shown))
        try:
            await self.network.announce(record)
        except WireError:
            return  # nobody there to keep it: the network says so once

    async def look_up(self) -> None:
        """Find the replicas of the block in the DHT; show ourselves to those that are new."""
        found = await self.network.replicas(self.block)
        new = [s for s in found if s.peer_id not in self._met]
        for signed in found:
            self.hear(signed)
        if self._own is not None:
            await asyncio.gather(*(self._show(s.peer_id, self._own) for s in new))

    async def _show(self, peer: bytes, own: SignedRecord) -> None:
        if peer == self.network.peer_id:
            return
        try:
            _, payload = await self.peers.ask(
                peer_text(peer), announce_of(own), messages.AnnounceReply, SHOW_S
            )
            for claim in unpack_records(payload):
                self.hear(verify(*claim, time.time()))
        except WireError:
            return  # it is late or gone; the round does not wait for it

    def hear(self, signed: SignedRecord) -> None:
        """A verified record, from wherever. Others' blocks and older ones are left aside."""
        if signed.peer_id == self.network.peer_id or signed.record.block != self.block:
            return
        known = self._met.get(signed.peer_id)
        if known is not None and known.freshness >= signed.freshness:
            return
        if known is None and len(self._met) >= RECORDS_PER_REPLY:
            return
        self._met[signed.peer_id] = signed
        self.network.discovery.learn(signed)
        self.on_record(record_event(signed))

    def known(self) -> list[SignedRecord]:
        """Our own record first, then the others' that are still alive."""
        now = time.time()
        alive = [s for s in self._met.values() if s.expiration_s > now]
        return ([self._own] if self._own else []) + alive
