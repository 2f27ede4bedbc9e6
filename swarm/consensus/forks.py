"""Which consensus a replica should stand on, and how it gets there.

Decides between branches, from the heads that peers signed in this round. Knows nothing of how
branches come to be: a vote that reached only some, a pause, a late joiner and a partition all look
the same here and are cured the same way.

Whose heads count: those of contributors, peers with an update in our own log. Identities are free,
and any of them can sign a chain that it made up; to get into our log takes work that the others
accepted. Only where no contributor has moved for AWAY rounds do others count, first those that were
seen for some rounds: we may have slept while all whom we knew were replaced.

Of the heads that count, those that are fresh are compared: within FRESH rounds of the newest one.
(Otherwise a replica that was asleep, or a newcomer with the run's first weights, would be one of
two equal sides.) The one signed by more peers wins, ties go to the lower digest. We are one of the
peers.

Two sides that began a block apart are strangers to each other at first. But an update names no
consensus: each side takes the other's updates into rounds of its own, and one that went in makes
its sender a contributor. So they know each other after a round or two, and find together.

Known limits: a log of no more than YOUNG entries makes no contributors, so a run's beginning is
decided by who shows up; sides that began apart and take no update of each other (left out by the
rule, excluded, too late) stay apart; whoever has more identities in our log than there are honest
contributors wins.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from protocol.log import Entry
from swarm.consensus.log import ConsensusLog, MoveMode, MovePlan

FRESH = 2
AWAY = 16  # rounds after which those who stood still no longer speak for the block
YOUNG = 16  # entries of a log that does not say yet who belongs to the block
REBASE_DEPTH = 4


class Word(enum.IntEnum):
    """What a peer's word weighs between two branches. A lower one counts if there is no higher."""

    STRANGER = 0
    SENIOR = 1  # seen for some rounds
    CONTRIBUTOR = 2  # an update of its is in our log


@dataclass(frozen=True)
class SignedHead:
    """What a peer said it stands on, in its record or vote of this round."""

    digest: bytes
    round: int
    word: Word


def support(heads: Mapping[str, SignedHead], next_round: int) -> Counter[bytes]:
    """How many peers stand on each fresh head, of those whose word counts.

    A head of `next_round` or later is a lie: no such round was decided yet.
    """
    possible = [head for head in heads.values() if head.round < next_round]
    here = [head for head in possible if head.round >= next_round - AWAY] or possible
    word = max((head.word for head in here), default=Word.STRANGER)
    heard = [head for head in here if head.word is word]
    newest = max((head.round for head in heard), default=-1)
    return Counter(head.digest for head in heard if head.round >= newest - FRESH)


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
