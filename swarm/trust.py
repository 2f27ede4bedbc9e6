"""Whom a replica listens to: how long it has seen a peer, what it caught it at, the canary.

Decides whom to leave out and for how long, and whose word counts between two branches. Knows
nothing of how a fault was found, nor of the objective rule on updates (swarm/aggregate.py).

This is one replica's own view. It acts through its votes: an update is kept out when more than half
of the voters think alike. Identities are free, so nobody is ever trusted for being many: a peer's
word counts after it was seen for some rounds, and exclusions double each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

MAX_PEERS = 4096


@dataclass(frozen=True)
class TrustRules:
    """`fault_limit` faults within `fault_memory` rounds exclude for `exclusion` rounds, doubled
    each time up to `longest_exclusion`."""

    seniority: int = 3
    fault_limit: int = 2
    fault_memory: int = 16
    exclusion: int = 8
    longest_exclusion: int = 256
    absence: int = 16  # a peer not seen for so long starts anew


@dataclass(frozen=True)
class Standing:
    """What is known of one peer."""

    rounds_seen: int = 0
    last_seen: int = -1
    faults: tuple[int, ...] = ()  # rounds of recent faults
    excluded_until: int = -1  # the last round of its exclusion
    exclusions: int = 0


@dataclass(frozen=True)
class TrustBook:
    """The standing of every peer seen lately. Immutable."""

    rules: TrustRules = field(default_factory=TrustRules)
    peers: Mapping[str, Standing] = field(default_factory=dict)

    def of(self, peer: str) -> Standing:
        return self.peers.get(peer, Standing())

    def _with(self, peer: str, standing: Standing) -> TrustBook:
        return replace(self, peers=_bounded({**self.peers, peer: standing}))

    def seen(self, peers: Iterable[str], number: int) -> TrustBook:
        """Count a round in which these peers showed a signed record; once per round."""
        book = dict(self.peers)
        for peer in peers:
            old = book.get(peer, Standing())
            if number <= old.last_seen:
                continue
            gone = old.last_seen >= 0 and number - old.last_seen > self.rules.absence
            rounds = 1 if gone else old.rounds_seen + 1
            book[peer] = replace(old, rounds_seen=rounds, last_seen=number)
        return replace(self, peers=_bounded(book))

    def senior(self, peer: str) -> bool:
        return self.of(peer).rounds_seen >= self.rules.seniority

    def excluded(self, peer: str, number: int) -> bool:
        return number <= self.of(peer).excluded_until

    def fault(self, peer: str, number: int) -> TrustBook:
        """A refused update (digest, shape, range, round, block) or two-faced votes."""
        old = self.of(peer)
        recent = [n for n in old.faults if number - n < self.rules.fault_memory]
        faults = (*recent, number)[-self.rules.fault_limit :]
        book = self._with(peer, replace(old, faults=faults))
        return book.exclude(peer, number) if len(faults) >= self.rules.fault_limit else book

    def exclude(self, peer: str, number: int) -> TrustBook:
        """Leave the peer out for a time, beginning with the next round."""
        old = self.of(peer)
        length = min(self.rules.exclusion << min(old.exclusions, 16), self.rules.longest_exclusion)
        return self._with(
            peer,
            replace(old, faults=(), excluded_until=number + length, exclusions=old.exclusions + 1),
        )


def _bounded(peers: dict[str, Standing]) -> dict[str, Standing]:
    """Forget who was seen longest ago, but an exclusion last: identities are free to flood us."""
    if len(peers) <= MAX_PEERS:
        return peers
    ranked = sorted(peers, key=lambda p: (peers[p].excluded_until, peers[p].last_seen))
    return {p: peers[p] for p in ranked[-MAX_PEERS:]}


@dataclass(frozen=True)
class Canary:
    """Watches the held-out CE of the consensus. A jump is a reason to test updates one by one."""

    margin_nats: float = 0.05
    history: int = 8
    recent_nats: tuple[float, ...] = ()

    def with_loss(self, loss_nats: float) -> tuple[Canary, bool]:
        """The next canary, and whether this loss is an alarm: worse than the median of the recent
        ones by more than the margin, or not a number. An alarming loss is not remembered."""
        if loss_nats != loss_nats:
            return self, True
        if self.recent_nats:
            middle = sorted(self.recent_nats)[(len(self.recent_nats) - 1) // 2]
            if loss_nats > middle + self.margin_nats:
                return self, True
        return replace(self, recent_nats=(*self.recent_nats, loss_nats)[-self.history :]), False

    def harmful(self, before_nats: float, after_nats: Sequence[tuple[str, float]]) -> list[str]:
        """Senders whose update alone makes the consensus worse by more than the margin."""
        return [s for s, loss in after_nats if not loss <= before_nats + self.margin_nats]
