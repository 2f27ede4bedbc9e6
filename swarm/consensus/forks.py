"""Choice between branches of a block's log, from the heads that peers signed in this round.

Branches from a vote that reached only some, a pause, a late joiner or a partition are all treated
in the same way.

Heads of contributors count: peers with an update in our own log. Identities are free, and any of
them can sign an invented chain, but an update in our log takes work that the others accepted. Only
if no contributor has moved for AWAY rounds do other peers count, first those seen for some rounds:
we may have been offline while all known peers were replaced.

Of these heads only fresh ones are compared, within FRESH rounds of the newest. (Otherwise a replica
that was offline, or a newcomer with the run's initial weights, could tie with the others.) The head
signed by most peers wins, our own included; ties go to the lower digest.

Two sides that began a block separately have no contributors in common at first. But an update names
no consensus: each side includes the other's updates in its own rounds, which makes their senders
contributors. So after a round or two the sides count each other's heads and merge.

Known limits: a log of at most YOUNG entries makes no contributors, so the start of a run is decided
by whichever peers are there; sides that began apart and include no update of each other (left out
by the rule, excluded, too late) stay apart; an attacker with more identities in our log than there
are honest contributors wins.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from protocol.log import Entry
from swarm.consensus.log import ConsensusLog, MoveMode, MovePlan

FRESH = 2
AWAY = 16  # rounds after which an old head no longer counts
YOUNG = 16  # a log with no more entries than this makes no contributors
REBASE_DEPTH = 4


class Word(enum.IntEnum):
    """How well we know a peer: stranger < seen for some rounds < contributed.

    Only heads of peers at the highest level that is present count.
    """

    STRANGER = 0
    SENIOR = 1  # seen for some rounds
    CONTRIBUTOR = 2  # has an update in our log


@dataclass(frozen=True)
class SignedHead:
    """The head in a peer's record or vote of this round, and how well we know the peer."""

    digest: bytes
    round: int
    word: Word


def support(heads: Mapping[str, SignedHead], next_round: int) -> Counter[bytes]:
    """How many peers signed each fresh head, of the peers that count.

    A head of `next_round` or later is false, since no such round was decided yet.
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
    """How a replica that changes branches keeps what it has learned.

    REBASE: a short branch is undone exactly, and its updates go back to their senders. After a long
    branch (a partition) that would add what both sides learned, as if the learning rate had doubled
    for all those rounds.
    MERGE: after a long branch, only what the other side did not learn as well is kept.
    KEEP: if nobody has the weights at the fork, the running weights stay and the difference is
    unsent, so that the next rounds average the two sides. The last resort: it pulls the winner
    back, which the robust rule may take for opposition.
    """
    if plan.known:
        return MoveMode.MERGE if len(plan.rollback) > REBASE_DEPTH else MoveMode.REBASE
    # No common ancestor. If their log begins after our head, we were only away for long.
    return MoveMode.KEEP if theirs[0].round <= log.head.round else MoveMode.REBASE
