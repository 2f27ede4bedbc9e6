"""Votes, and the set of updates that they agree on.

Decides which updates go into a round, given the votes that arrived. Knows nothing of deadlines,
transport or signatures (the node checks a vote's signature before it comes here).

A vote lists what its voter holds and accepts, on top of one consensus (`base`). Votes on another
base are kept but not counted: the same updates on another base make another consensus.
Who may vote is read from the consensus log (see `swarm.consensus.log.eligible_voters`), not from
what one replica happened to observe: replicas with the same votes and the same base must get the
same set.

Known limit: a vote that reaches only some replicas can make their sets differ. Missing votes are
asked for once, from everybody (they are signed, anyone may pass them on); what differs after that
shows as another `base` in the next round, and the minority moves (see `swarm.rounds.round`).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from protocol.errors import WireError
from protocol.limits import DECLINED_PER_VOTE

MAX_LISTED = 16
DIGEST_BYTES = 32


class VoteError(WireError):
    """A vote that no honest replica sends."""


@dataclass(frozen=True, order=True)
class UpdateRef:
    """One update: its digest names it, its sender answers for it. Ordered by digest."""

    digest: bytes
    sender: str


class Reason(enum.IntEnum):
    """Why a voter does not accept a sender's update, although it could have it.

    It is said in the vote, so that whoever is left out hears why. Of one that is neither listed nor
    declined the voter knew nothing in time. A newer voter may have reasons that we do not know.
    """

    OTHER = 0
    REFUSED = 1  # it is no valid update of this round
    FAULT = 2  # earlier ones were none, or its sender was two-faced: it is left out for some rounds
    HARM = 3  # earlier ones made the voter's held-out text worse: likewise


@dataclass(frozen=True)
class Vote:
    """What `voter` holds and accepts in a round. Stage 0: updates; stage 1: groups' aggregates."""

    voter: str
    round: int
    base: bytes
    base_round: int
    listed: tuple[UpdateRef, ...]
    stage: int = 0
    declined: tuple[tuple[str, Reason], ...] = ()  # by sender


def checked_vote(vote: Vote) -> Vote:
    """The same vote if it is well formed; otherwise VoteError."""
    if len(vote.listed) > MAX_LISTED:
        raise VoteError(f"vote lists {len(vote.listed)} updates, more than {MAX_LISTED}")
    if len(vote.base) != DIGEST_BYTES or any(
        len(ref.digest) != DIGEST_BYTES for ref in vote.listed
    ):
        raise VoteError("vote with a digest of a wrong length")
    if list(vote.listed) != sorted(set(vote.listed)):
        raise VoteError("vote lists an update twice or out of order")
    if len({ref.sender for ref in vote.listed}) != len(vote.listed):
        raise VoteError("vote lists two updates of one sender")
    declined = [sender for sender, _ in vote.declined]
    if declined != sorted(set(declined)) or len(declined) > DECLINED_PER_VOTE:
        raise VoteError("vote declines a sender twice, or too many")
    if vote.stage not in (0, 1) or vote.round < 0 or vote.base_round > vote.round:
        raise VoteError("vote with an impossible round")
    return vote


@dataclass(frozen=True)
class Ballot:
    """The votes of one stage of one round, at most one per voter."""

    votes: Mapping[str, Vote] = field(default_factory=dict)
    two_faced: frozenset[str] = frozenset()

    def with_vote(self, vote: Vote) -> Ballot:
        """Repeated votes change nothing; two different ones of one voter void both."""
        known = self.votes.get(vote.voter)
        if known == vote or vote.voter in self.two_faced:
            return self
        if known is not None:
            rest = {voter: v for voter, v in self.votes.items() if voter != vote.voter}
            return Ballot(rest, self.two_faced | {vote.voter})
        return replace(self, votes={**self.votes, vote.voter: vote})

    def counted(self, base: bytes, eligible: Collection[str]) -> list[Vote]:
        """The votes on `base` of eligible voters; of all voters if none of them is eligible."""
        on_base = [vote for vote in self.votes.values() if vote.base == base]
        return [vote for vote in on_base if vote.voter in eligible] or on_base

    def holders(self, ref: UpdateRef) -> tuple[str, ...]:
        """Who said that it has this update (on whatever base)."""
        return tuple(sorted(v.voter for v in self.votes.values() if ref in v.listed))


def agreed_set(votes: Iterable[Vote]) -> tuple[UpdateRef, ...]:
    """What more than half of the votes list, in the order of digests, one per sender."""
    votes = list(votes)
    tally = Counter(ref for vote in votes for ref in vote.listed)
    chosen: dict[str, UpdateRef] = {}
    for ref in sorted(ref for ref, count in tally.items() if 2 * count > len(votes)):
        chosen.setdefault(ref.sender, ref)
    return tuple(sorted(chosen.values()))
