"""A replica's notice board: its record in the DHT and shown to peers, theirs heard from both.

The DHT finds replicas that one has not met; those that one has met are shown the record directly,
which takes one round trip instead of a walk; of two that are ready at different times only the
first asks (`held_answers`). Whom it is shown to and whose records are kept is decided in `notices`.
Knows nothing of what a record leads to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from node.log.fetch import Peers
from node.machine.going_on import going_on
from node.network.network import Network
from node.replica.held_answers import HeldAnswers
from node.replica.notices import DHT, PEERS_SHOWN, UNPROVEN_SHOWN, Notices
from protocol import messages
from protocol.errors import WireError
from protocol.identity import peer_text
from protocol.limits import PEER_ID_BYTES, RECORDS_PER_ANNOUNCE
from protocol.payloads import announce_of, unpack_records
from protocol.records import Record, SignedRecord, verify_record
from protocol.votes import UpdateRef
from swarm.rounds import actions as act

_log = logging.getLogger(__name__)

SHOW_S = 5.0
HOLD_S = 1.0  # an answer waits for our own record

Quiet = Callable[[], Awaitable[None]]  # returns when there is time


class ReplicaBoard:
    """Publishes for one replica and hears for it."""

    def __init__(
        self,
        network: Network,
        peers: Peers,
        block: int,
        role: int,
        on_record: Callable[[act.PeerRecord], None],
        show_s: float = SHOW_S,
    ) -> None:
        self.network, self.peers, self.block, self.role = network, peers, block, role
        self.on_record = on_record
        self.show_s = min(show_s, SHOW_S)
        self._answers = HeldAnswers(min(self.show_s / 2, HOLD_S))
        self._own: SignedRecord | None = None
        self.notices = Notices(network.standings, network.clock)
        self._storing: asyncio.Task[None] | None = None
        self._stored = False  # whether our last record got into the DHT
        self._addresses: tuple[str, ...] = ()

    async def publish(self, announcement: act.PublishRecord, quiet: Quiet | None = None) -> None:
        """Show our record to the replicas that we know, and put it into the DHT.

        The DHT is for those that do not know us yet: that can wait until it is `quiet`, unless the
        last record did not get there.
        """
        update = announcement.update
        try:
            addresses = self._addresses or await self.network.addresses()
        except WireError:
            return  # no daemon: it is being started again, and nobody could hear us
        record = Record(
            run=self.network.settings.run_id,
            role=self.role,
            block=self.block,
            round=max(announcement.round, 0),
            sequence=0,  # the network numbers and signs it
            consensus=announcement.head,
            head_round=announcement.head_round,
            update=update.digest if update else b"",
            update_bytes=announcement.size_bytes,
            proposal_ms=round(announcement.proposal_s * 1000),
            addresses=addresses,
        )
        self._own = own = self.network.discovery.seal(record)
        if self._storing is not None:
            # A slow walk of an older round must not end after this one: it would be signed later.
            self._storing.cancel()
        wait, self._stored = quiet if self._stored and self.has_company else None, False
        self._storing = storing = asyncio.create_task(self._store(record, wait))
        told = self._answers.say(own.record.round)
        try:
            new = [peer for peer in self.notices.to_show() if peer_text(peer) not in told]
            await asyncio.gather(*(self._show(peer, own) for peer in new))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(storing)
        finally:
            if storing is self._storing and not storing.done():
                storing.cancel()

    async def _store(self, record: Record, wait: Quiet | None) -> None:
        if wait is not None:
            await wait()
        # Nobody there to keep it, a WireError: the network says so once.
        with going_on(_log, "storing our record", WireError):
            # Asked for again in every round, but not while the others wait for our record.
            self._addresses = await self.network.addresses()
            await self.network.announce(replace(record, addresses=self._addresses))
            self._stored = True

    async def look_up(self) -> None:
        """Find the replicas of the block in the DHT; show ourselves to those that are new."""
        found = await self.network.replicas(self.block, cap=PEERS_SHOWN)
        new = [s.peer_id for s in found if s.peer_id not in self.notices]
        for signed in found:
            self.hear(signed)
        if self._own is not None:
            # The others, of a flood, have their turn when we publish.
            await asyncio.gather(*(self._show(peer, self._own) for peer in new[:UNPROVEN_SHOWN]))

    async def _show(self, peer: bytes, own: SignedRecord) -> None:
        if peer == self.network.peer_id:
            return
        answered = False
        # Of a peer that is late or gone nothing is said; the round does not wait for it.
        with going_on(_log, "showing our record", WireError):
            _, payload = await self.peers.ask(
                peer_text(peer), announce_of(own), messages.AnnounceReply, self.show_s
            )
            answered = True
            for claim in unpack_records(payload, RECORDS_PER_ANNOUNCE):
                if not self._holds(claim):
                    self.hear(verify_record(*claim, self.network.clock()), peer)
        self.notices.shown(peer, answered)

    def _holds(self, claim: tuple[bytes, bytes, bytes, float]) -> bool:
        """Whether this very record is here, verified: each answer has mostly such ones."""
        _, subkey, value, expiration_s = claim
        known = self.notices.get(subkey[-PEER_ID_BYTES:])
        return known is not None and (known.value, known.expiration_s) == (value, expiration_s)

    async def answer(self, signed: SignedRecord, asker: bytes) -> list[SignedRecord]:
        """A record that somebody shows us; what to show in return, our own first.

        Replicas show their own. One of somebody else is left aside: whoever it is can speak.
        """
        if signed.peer_id == asker:
            known = asker in self.notices
            self.network.standings.spoke(asker)
            self.hear(signed, asker)
            if known:  # a newcomer needs what there is at once
                await self._answers.until_said(peer_text(asker), signed.record.round)
        return self.known()

    def hear(self, signed: SignedRecord, teller: bytes = DHT) -> None:
        """A verified record, from wherever. Of other runs and blocks, and older: left aside."""
        record = signed.record
        if record.run != self.network.settings.run_id or record.block != self.block:
            return
        if signed.peer_id != self.network.peer_id and self.notices.hear(signed, teller):
            self.network.discovery.learn(signed)
            self.on_record(record_event(signed))

    @property
    def has_company(self) -> bool:
        """Whether another replica that spoke to us, or contributed, has a record that is alive."""
        return self.notices.has_company

    def known(self) -> list[SignedRecord]:
        """Our own record first, then the others' that are still alive, the best known first."""
        return ([self._own] if self._own else []) + self.notices.best_first()


def record_event(signed: SignedRecord) -> act.PeerRecord:
    """A verified record as the round hears it."""
    record, peer = signed.record, peer_text(signed.peer_id)
    update = UpdateRef(record.update, peer) if record.update else None
    return act.PeerRecord(
        peer,
        record.round,
        record.consensus,
        record.head_round,
        update,
        record.update_bytes,
        record.proposal_ms / 1000,
    )
