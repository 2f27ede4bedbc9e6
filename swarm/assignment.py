"""Which block a host works on.

Decides from what everybody can read in the DHT and the logs. Knows nothing of how it was read.

A newcomer takes one of the neediest blocks (fewest replicas whose updates were included lately)
at random, among those that fit into its memory. A host that has a block moves only if another one
is below its minimum, and only if it is not among the few that keep its own (`must_stay`). All
hosts see the same need at the same moment, so if each moved at once the whole swarm would run to
the empty block and back: each host moves with a probability such that about as many move as are
missing, then rests for some rounds. When a move is due and it is not drawn it is tried again.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockView:
    """A block as a host sees it. `replicas` counts hosts included lately or just arrived."""

    block: int
    replicas: int
    memory_bytes: int
    download_bytes: int
    minimum: int = 1


@dataclass(frozen=True)
class HostLimits:
    """What this host can hold, and what it may still download today."""

    memory_bytes: int
    download_bytes: int


@dataclass(frozen=True)
class MoveRules:
    """A host rests `rest_rounds` after a move, and moves only after `patience_rounds` of need."""

    rest_rounds: int = 8
    patience_rounds: int = 2


def fitting(blocks: Sequence[BlockView], limits: HostLimits) -> list[BlockView]:
    """The blocks that this host can hold and may download."""
    return [
        view
        for view in blocks
        if view.memory_bytes <= limits.memory_bytes and view.download_bytes <= limits.download_bytes
    ]


def first_choice(blocks: Sequence[BlockView], limits: HostLimits, rng: random.Random) -> int | None:
    """The block of a newcomer, or None if nothing fits. Below-minimum blocks come first."""
    possible = fitting(blocks, limits)
    if not possible:
        return None
    least = min(view.replicas - view.minimum for view in possible)
    return rng.choice([v.block for v in possible if v.replicas - v.minimum == least])


def move(
    own: int,
    blocks: Sequence[BlockView],
    limits: HostLimits,
    rounds_here: int,
    needy_rounds: Mapping[int, int],
    rng: random.Random,
    *,
    stays: bool,
    rules: MoveRules | None = None,
) -> int | None:
    """The block to move to now, or None to stay.

    `needy_rounds`: for how long each block was in need. `stays`: see `must_stay`.
    """
    rules = rules or MoveRules()
    if stays or rounds_here < rules.rest_rounds:
        return None
    needy = [
        view
        for view in fitting([v for v in blocks if v.block != own], limits)
        if view.replicas < view.minimum and needy_rounds.get(view.block, 0) >= rules.patience_rounds
    ]
    if not needy:
        return None
    target = rng.choice(needy)
    missing = target.minimum - target.replicas
    spare = sum(max(view.replicas - view.minimum, 0) for view in blocks)
    # About `missing` of the spare hosts go. Not a certainty even if all are needed: the others
    # decide at the same moment, and who is not drawn tries again the next round.
    return target.block if rng.random() < min(missing / max(spare, 1), 0.75) else None


def must_stay(me: str, replicas: Collection[str], minimum: int) -> bool:
    """Whether this host is one of the `minimum` that keep the block: those of the lowest hash.

    Without it the two replicas of a block would leave together, each relying on the other.
    """
    ranked = sorted({*replicas, me}, key=lambda p: hashlib.blake2b(p.encode()).digest())
    return me in ranked[:minimum]


def needy_rounds_after(before: Mapping[int, int], blocks: Sequence[BlockView]) -> dict[int, int]:
    """One more round of watching: blocks below their minimum, and for how many rounds they were."""
    return {v.block: before.get(v.block, 0) + 1 for v in blocks if v.replicas < v.minimum}


def several(
    blocks: Sequence[BlockView],
    limits: HostLimits,
    taken: Sequence[int],
    count: int,
    rng: random.Random,
) -> list[int]:
    """Blocks for `count` more workers of one host; fewer if they do not fit (`limits` of each).

    `taken` are those of its other workers. Different blocks as long as there are any: replicas on
    one host die together, so they cover a block no better than one of them. Then the neediest.
    """
    possible = fitting(blocks, limits)
    own = Counter(taken)
    chosen: list[int] = []
    for _ in range(count if possible else 0):
        need = {v.block: (own[v.block], v.replicas - v.minimum) for v in possible}
        least = min(need.values())
        chosen.append(rng.choice(sorted(block for block in need if need[block] == least)))
        own[chosen[-1]] += 1
    return chosen
