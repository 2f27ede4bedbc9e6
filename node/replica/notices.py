"""The records on a replica's notice board: whose are kept, who is shown ours, what is passed on.

Decides by the owner's standing and by our own clock, never by what a record says of itself: its
owner chooses its expiry and its round. Hearsay has few places for each who tells it, makes room
for whoever speaks for itself, and only some of it is dialled in a round, so that a stranger cannot
make this host knock at many doors of others. Knows nothing of the network or of rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from node.network.standing import Standing, Standings
from protocol.limits import RECORDS_PER_ANNOUNCE
from protocol.records import SignedRecord

PEERS_SHOWN = 64  # in a round
UNPROVEN_SHOWN = 16  # of them such that never answered us, or not lately: as many as a group has
PEERS_MET = 512
TOLD_BY_ONE = RECORDS_PER_ANNOUNCE
TOLD_BY_DHT = 64
DHT = b""  # who told us, if it was nobody in particular


@dataclass
class _Notice:
    signed: SignedRecord
    teller: bytes
    vain: int = 0  # how often in a row its owner did not answer when we showed ours


class Notices:
    """The newest record of each replica. `clock` is the one that records expire by."""

    def __init__(self, standings: Standings, clock: Callable[[], float]) -> None:
        self._standings, self._clock = standings, clock
        self._met: dict[bytes, _Notice] = {}  # in the order in which they came

    def __contains__(self, peer_id: bytes) -> bool:
        return peer_id in self._met

    def get(self, peer_id: bytes) -> SignedRecord | None:
        notice = self._met.get(peer_id)
        return None if notice is None else notice.signed

    def hear(self, signed: SignedRecord, teller: bytes) -> bool:
        """A verified record; whether it is news, and kept."""
        if signed.expiration_s <= self._clock():
            return False
        known = self._met.get(signed.peer_id)
        if known is None:
            if not self._has_room(signed.peer_id, teller):
                return False
            self._met[signed.peer_id] = _Notice(signed, teller)
            return True
        if known.signed.freshness >= signed.freshness:
            return False
        known.signed = signed
        return True

    def _has_room(self, newcomer: bytes, teller: bytes) -> bool:
        """Make some if need be: hearsay takes nobody's place, others take that of the least."""
        standing = self._standings.of(newcomer)
        if standing is Standing.HEARSAY and not self._may_tell(teller):
            return False
        if len(self._met) < PEERS_MET:
            return True
        self._forget_expired()
        if len(self._met) < PEERS_MET:
            return True
        least = min(self._met, key=self._standings.rank)
        if standing is Standing.HEARSAY or self._standings.of(least) > standing:
            return False
        del self._met[least]
        return True

    def _may_tell(self, teller: bytes) -> bool:
        """Whether there is a place for more of its hearsay; what led nowhere makes room."""
        hearsay = [
            peer
            for peer, notice in self._met.items()
            if notice.teller == teller and self._standings.of(peer) is Standing.HEARSAY
        ]
        if len(hearsay) < (TOLD_BY_ONE if teller != DHT else TOLD_BY_DHT):
            return True
        worst = max(hearsay, key=lambda peer: self._met[peer].vain)
        if not self._met[worst].vain:
            return False
        del self._met[worst]
        return True

    def _forget_expired(self) -> None:
        now_s = self._clock()
        self._met = {p: n for p, n in self._met.items() if n.signed.expiration_s > now_s}

    def shown(self, peer_id: bytes, answered: bool) -> None:
        """Our record was shown to it."""
        notice = self._met.get(peer_id)
        if notice is not None:
            notice.vain = 0 if answered else notice.vain + 1

    def to_show(self) -> list[bytes]:
        """Whom to show our record to now.

        Those that are known to answer, and some of the others, each in its turn: who was tried
        least, then who waits longest. A flood of names delays an honest one, it does not hide it.
        """
        proven = [peer for peer in self._ranked() if self._proven(peer)]
        others = [peer for peer in self._met if not self._proven(peer)]
        others.sort(key=lambda peer: self._met[peer].vain)
        others = others[:UNPROVEN_SHOWN]
        return proven[: PEERS_SHOWN - len(others)] + others

    def _proven(self, peer: bytes) -> bool:
        standing = self._standings.of(peer)
        return standing is Standing.CONTRIBUTOR or (
            standing is Standing.SPOKE and not self._met[peer].vain
        )

    def _ranked(self) -> list[bytes]:
        self._forget_expired()
        return sorted(self._met, key=self._standings.rank, reverse=True)

    def best_first(self) -> list[SignedRecord]:
        return [self._met[peer].signed for peer in self._ranked()]

    @property
    def has_company(self) -> bool:
        """Whether a replica that is more than hearsay has a record that is alive."""
        return any(self._standings.of(peer) > Standing.HEARSAY for peer in self._ranked()[:1])
