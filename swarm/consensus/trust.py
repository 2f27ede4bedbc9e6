"""A replica's trust in peers: rounds seen, faults, exclusions; and the canary.

This is one replica's own view, and takes effect through its votes: an update is kept out if more
than half of the voters exclude its sender. Identities are free, so numbers earn no trust: a peer
counts after it was seen for some rounds, and exclusions double each time. The rule that all
replicas compute alike is `swarm.consensus.aggregate`'s.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

MAX_PEERS = 4096


@dataclass(frozen=True)
class TrustRules:
    """`fault_limit` faults within `fault_memory` rounds exclude a peer for `exclusion` rounds,
    doubled each time up to `longest_exclusion`."""

    seniority: int = 3
    fault_limit: int = 2
    fault_memory: int = 16
    exclusion: int = 8
    longest_exclusion: int = 256
    absence: int = 16  # a peer not seen for more rounds than this starts anew


@dataclass(frozen=True)
class PeerTrust:
    """What is known of one peer."""

    rounds_seen: int = 0
    last_seen: int = -1
    faults: tuple[int, ...] = ()  # rounds of recent faults
    excluded_until: int = -1  # the last round of its exclusion
    exclusions: int = 0
    reason: str = ""  # of its last exclusion, for a person
    harmed: bool = False  # whether that was the canary's


@dataclass(frozen=True)
class TrustBook:
    """The standing of all recently seen peers. Immutable."""

    rules: TrustRules = field(default_factory=TrustRules)
    peers: Mapping[str, PeerTrust] = field(default_factory=dict)

    def of(self, peer: str) -> PeerTrust:
        return self.peers.get(peer, PeerTrust())

    def _with(self, peer: str, standing: PeerTrust) -> TrustBook:
        return replace(self, peers=_bounded({**self.peers, peer: standing}))

    def seen(self, peers: Iterable[str], number: int) -> TrustBook:
        """Count a round in which these peers showed a signed record or vote, once per round."""
        book = dict(self.peers)
        for peer in peers:
            old = book.get(peer, PeerTrust())
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

    def fault(self, peer: str, number: int, reason: str = "") -> TrustBook:
        """Note a fault: a refused update (digest, shape, range, round, block) or two votes."""
        old = self.of(peer)
        recent = [n for n in old.faults if number - n < self.rules.fault_memory]
        faults = (*recent, number)[-self.rules.fault_limit :]
        book = self._with(peer, replace(old, faults=faults))
        return book.exclude(peer, number, reason) if len(faults) >= self.rules.fault_limit else book

    def exclude(self, peer: str, number: int, reason: str = "", harmed: bool = False) -> TrustBook:
        """Exclude the peer for some rounds, beginning with the next."""
        old = self.of(peer)
        length = min(self.rules.exclusion << min(old.exclusions, 16), self.rules.longest_exclusion)
        out = replace(old, faults=(), excluded_until=number + length, exclusions=old.exclusions + 1)
        return self._with(peer, replace(out, reason=reason, harmed=harmed))


def _bounded(peers: dict[str, PeerTrust]) -> dict[str, PeerTrust]:
    """At most MAX_PEERS, since identities are free: drops those seen longest ago, excluded last."""
    if len(peers) <= MAX_PEERS:
        return peers
    ranked = sorted(peers, key=lambda p: (peers[p].excluded_until, peers[p].last_seen))
    return {p: peers[p] for p in ranked[-MAX_PEERS:]}


@dataclass(frozen=True)
class Canary:
    """Finds senders whose updates make the held-out CE of the consensus worse.

    The harm of one update of ordinary norm is below the margin; summed over rounds it is not. So
    the test takes all that a sender added since an earlier measurement, alone, on top of the
    consensus of then. Our own part is tested too, as the control. Two occasions:
    - A jump of the CE: tested since the best of the recent measurements. No sender is blamed for
      what our own part does as well (because of the learning rate, or text unlike ours). Without a
      control at most half of the senders are blamed.
    - An audit, once per `history`: a sender that undoes our progress keeps the CE from falling
      without a jump. Tested since the oldest of the recent measurements. Blamed are senders whose
      part worsens the CE by at least a quarter of what ours improves it; none if ours improves
      nothing.
    No sender is blamed if the earlier consensus itself measures worse now than then: in that case
    the copies of other blocks have changed.
    """

    margin_nats: float = 0.05
    gain_nats: float = 0.02  # smaller changes prove nothing in an audit
    history: int = 8
    recent: tuple[tuple[bytes, float], ...] = ()  # head -> its loss, oldest first
    unaudited: int = 0  # measurements since the last audit

    def with_loss(self, head: bytes, loss_nats: float) -> tuple[Canary, bool]:
        """The next canary, and whether this loss is an alarm: above the median of the recent ones
        by more than the margin, or not finite. Such a loss is not remembered."""
        losses = sorted(loss for _, loss in self.recent)
        limit = losses[(len(losses) - 1) // 2] + self.margin_nats if losses else math.inf
        if loss_nats > limit or not math.isfinite(loss_nats):
            return self, True
        recent = (*self.recent, (head, loss_nats))[-self.history :]
        return replace(self, recent=recent, unaudited=self.unaudited + 1), False

    @property
    def audit_due(self) -> bool:
        return self.unaudited >= self.history

    def audited(self) -> Canary:
        return replace(self, unaudited=0)

    def best(self, known: Collection[bytes]) -> bytes | None:
        """The recent head with the lowest loss, of those in `known` (weights still available)."""
        found = [(loss, head) for head, loss in self.recent if head in known]
        return min(found)[1] if found else None

    def oldest(self, known: Collection[bytes]) -> bytes | None:
        """The oldest recent head, of those in `known`."""
        return next((head for head, _ in self.recent if head in known), None)

    def still_holds(self, head: bytes, loss_nats: float) -> bool:
        """Whether a head, measured again, is as good as at its first measurement."""
        return loss_nats <= dict(self.recent)[head] + self.margin_nats

    def accepting(self, head: bytes, loss_nats: float) -> Canary:
        """After an alarm was examined: start again from the current head. Otherwise every round of
        a run that really got worse would be an alarm."""
        known = ((head, loss_nats),) if math.isfinite(loss_nats) else ()
        return replace(self, recent=known, unaudited=0)

    def harmful(self, before_nats: float, after_nats: Mapping[str, float], me: str) -> list[str]:
        """Senders whose part alone makes the consensus worse by more than the margin."""
        control = after_nats.get(me, before_nats)
        if math.isnan(control):
            return []
        limit = max(before_nats, control) + self.margin_nats
        bad = sorted(s for s, loss in after_nats.items() if s != me and not loss <= limit)
        return bad if me in after_nats or 2 * len(bad) <= len(after_nats) else []

    def undoing(self, before_nats: float, after_nats: Mapping[str, float], me: str) -> list[str]:
        """Senders whose part alone undoes what ours alone gains."""
        gain_nats = before_nats - after_nats.get(me, before_nats)
        if not gain_nats >= self.gain_nats:  # also if it is not a number
            return []
        limit = before_nats + max(gain_nats / 4, self.gain_nats)
        return sorted(s for s, loss in after_nats.items() if s != me and not loss <= limit)
