"""Which block a host works on, from public facts in the DHT and the logs.

A newcomer takes one of the neediest blocks (fewest replicas whose updates were included lately) at
random, among those that fit into its memory. A host with a block moves only if another block is
below its minimum, and only if it need not stay (`must_stay`). All hosts see the same need at the
same moment, and if all moved, the whole swarm would go to the empty block and back. So each moves
with such a probability that about as many move as are missing, and then rests for some rounds; if
it is not drawn, it tries again in the next round.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockView:
    """A block as seen by a host. `replicas`: hosts included lately or just arrived."""

    block: int
    replicas: int
    memory_bytes: int
    download_bytes: int
    minimum: int = 1


@dataclass(frozen=True)
class HostLimits:
    """This host's memory, and how much it may still download today."""

    memory_bytes: int
    download_bytes: int


@dataclass(frozen=True)
class MoveRules:
    """`rest_rounds` between moves; a block must be in need for `patience_rounds` before a move."""

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
    """The block of a newcomer, or None if none fits. Blocks below their minimum come first."""
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

    `needy_rounds`: for how many rounds each block was in need. `stays`: see `must_stay`.
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
    # On average `missing` of the spare hosts move. Never with certainty, since all hosts decide at
    # the same moment; a host that is not drawn tries again in the next round.
    return target.block if rng.random() < min(missing / max(spare, 1), 0.75) else None


def must_stay(me: str, replicas: Collection[str], minimum: int) -> bool:
    """Whether this host is one of the `minimum` that keep the block: those with the lowest hash.

    Without this the two replicas of a block could leave at the same time.
    """
    ranked = sorted({*replicas, me}, key=lambda p: hashlib.blake2b(p.encode()).digest())
    return me in ranked[:minimum]


def needy_rounds_after(before: Mapping[int, int], blocks: Sequence[BlockView]) -> dict[int, int]:
    """Blocks below their minimum, and for how many rounds, after one more round."""
    return {v.block: before.get(v.block, 0) + 1 for v in blocks if v.replicas < v.minimum}


def several(
    blocks: Sequence[BlockView],
    limits: HostLimits,
    taken: Sequence[int],
    count: int,
    rng: random.Random,
) -> list[int]:
    """Blocks for `count` more workers of one host; none if no block fits (`limits` of each).

    `taken`: the blocks of its other workers. Prefers different blocks, since replicas on one host
    fail together and cover a block no better than one; then the neediest.
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
