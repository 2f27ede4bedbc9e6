"""Which consensus a replica should stand on, and how it gets there.

Decides between branches, from the heads that peers signed in this round. Knows nothing of how
branches come to be: a vote that reached only some, a pause, a late joiner and a partition all look
the same here and are cured the same way.

A head counts if it is fresh: within FRESH rounds of the newest one. (Otherwise a replica that was
asleep, or a newcomer with the run's first weights, would be one of two equal sides.) Among fresh
heads the one signed by more peers of some seniority wins, ties go to the lower digest. We are one
of the peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from swarm.log import ConsensusLog, Entry, MoveMode, MovePlan

FRESH = 2
REBASE_DEPTH = 4


@dataclass(frozen=True)
class SignedHead:
    """What a peer said it stands on, in its record or vote of this round."""

    digest: bytes
    round: int
    senior: bool


def support(heads: Mapping[str, SignedHead], newest_round: int) -> Counter[bytes]:
    """How many peers stand on each fresh head: senior ones, or all if none of them is senior.

    A head from the future is a lie and does not make the others stale.
    """
    possible = [head for head in heads.values() if head.round < newest_round]
    newest = max((head.round for head in possible), default=-1)
    fresh = [head for head in possible if head.round >= newest - FRESH]
    senior = [head for head in fresh if head.senior] or fresh
    return Counter(head.digest for head in senior)


def winner(counts: Counter[bytes]) -> bytes | None:
    """The best supported head, ties to the lower digest."""
    return min(counts, key=lambda digest: (-counts[digest], digest), default=None)


def move_mode(log: ConsensusLog, plan: MovePlan, theirs: tuple[Entry, ...]) -> MoveMode:
    """How a replica takes along what it has learned.

    REBASE. A short branch is undone exactly: its updates go back to their senders, each is counted
    once. After a long branch (a partition) that would add everything that both sides learned, as
    if the learning rate had doubled for all those rounds.
    MERGE. So there, only what the other side did not learn as well is taken along.
    KEEP. Nobody has the weights at which the branches parted: the weights stay and the difference
    is unsent, so that the following rounds average the two sides. It pulls the winner back, which
    the robust rule may take for opposition; the last resort.
    """
    if plan.known:
        return MoveMode.MERGE if len(plan.rollback) > REBASE_DEPTH else MoveMode.REBASE
    # No common ancestor. If their log begins after our head we were just away for long.
    return MoveMode.KEEP if theirs[0].round <= log.head.round else MoveMode.REBASE
