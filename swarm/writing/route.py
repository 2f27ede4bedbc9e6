"""The route of a sweep: versions that were trained together, on the nearest and idlest replicas.

Chosen from the hosts' own offers and from measurements. A host that failed before is tried last,
but not excluded, since it may be the only one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from protocol.limits import SWEEP_PEERS_PER_HOP
from protocol.serving import Hop, Version
from swarm.learning.composition import default_weights
from swarm.learning.coupling import composed_versions
from swarm.run import Run


@dataclass(frozen=True)
class Offer:
    """What a serving host has, its latency, and how busy it is."""

    peer: bytes
    versions: tuple[Version, ...]
    latency_s: float
    waiting: int = 0
    usual_s: float = 0.0
    weights: tuple[float, ...] = ()
    temperature: float = 1.0

    @property
    def cost_s(self) -> float:
        return self.latency_s + self.waiting * self.usual_s


@dataclass(frozen=True)
class Route:
    """The hops in order, the composition's temperature, and the blocks without a host."""

    hops: tuple[Hop, ...]
    temperature: float
    missing: tuple[int, ...]
    hop_s: float  # the longest time that a healthy host of this route takes
    latency_s: float = 0.0  # round trip to the furthest of the hops' first peers

    @property
    def peers(self) -> frozenset[bytes]:
        return frozenset(peer for hop in self.hops for peer in hop.peers)


def choose_route(
    run: Run,
    offers: Sequence[Offer],
    penalties: Mapping[bytes, float],
    leave_out: Collection[int] = (),
    first: Mapping[int, bytes] = {},
) -> Route | None:
    """The route to take now, or None if no host serves anything.

    `first`: by block, the peers to prefer because they have the caches.
    """
    chosen = choose_versions(run, offers, leave_out)
    weights, temperature = composition(run, offers)
    missing = tuple(block for block in range(run.model.blocks) if block not in chosen)
    shares = [0.0 if block in missing else weights[block] for block in range(run.model.blocks)]
    if not any(shares):  # all weight was on missing blocks: equal weights for the rest
        shares = [0.0 if block in missing else 1.0 for block in range(run.model.blocks)]
    hops, slowest_s, furthest_s = [], 0.0, 0.0
    for block, version in sorted(chosen.items()):
        able = [offer for offer in offers if version in offer.versions]
        able.sort(
            key=lambda o: (first.get(block) != o.peer, penalties.get(o.peer, 0.0), o.cost_s, o.peer)
        )
        able = able[:SWEEP_PEERS_PER_HOP]
        slowest_s = max(slowest_s, *(offer.cost_s + offer.usual_s for offer in able))
        furthest_s = max(furthest_s, able[0].latency_s)
        peers = tuple(offer.peer for offer in able)
        hops.append(Hop(block, version.digest, shares[block], peers))
    return Route(tuple(hops), temperature, missing, slowest_s, furthest_s) if hops else None


def choose_versions(
    run: Run, offers: Sequence[Offer], leave_out: Collection[int] = ()
) -> dict[int, Version]:
    """For each block the version that the others were trained with, or the nearest to it."""
    holders: Counter[Version] = Counter(version for o in offers for version in set(o.versions))
    by_block: dict[int, list[Version]] = {}
    for version in holders:
        if version.block < run.model.blocks and version.block not in leave_out:
            by_block.setdefault(version.block, []).append(version)
    if not by_block:
        return {}
    newest = max(version.round for version in by_block[max(by_block)])
    staggered = run.model.relays and run.training.staggered
    wanted = composed_versions(run.model.blocks, newest, staggered)
    chosen = {}
    for block, versions in by_block.items():
        chosen[block] = min(
            versions, key=lambda v: (abs(v.round - wanted[v.block]), -holders[v], v.digest)
        )
    return chosen


def composition(run: Run, offers: Sequence[Offer]) -> tuple[tuple[float, ...], float]:
    """Weights and temperature that more than half of the hosts report; otherwise the default."""
    said = Counter(
        (offer.weights, offer.temperature)
        for offer in offers
        if len(offer.weights) == run.model.blocks
    )
    if said:
        (best, count), *_ = said.most_common(1)
        if 2 * count > said.total():
            return best
    return default_weights(run), 1.0
