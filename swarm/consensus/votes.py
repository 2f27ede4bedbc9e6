"""The votes of a round, and the set of updates that they agree on.

Signatures were verified before (`protocol.votes`). A vote lists what its voter holds and accepts,
on top of one consensus (`base`). Votes on another base are kept but not counted, since the same
updates on another base make another consensus. Who may vote is read from the log
(`swarm.consensus.log.eligible_voters`), not from one replica's observations, so that replicas with
the same votes and base get the same set.

Known limit: a vote that reaches only some replicas can make their sets differ. Missing votes are
asked for once, from all voters (votes are signed, so any peer may pass them on); a remaining
difference shows as another `base` in the next round, and the minority moves (`swarm.rounds.heads`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from protocol.votes import UpdateRef, Vote


@dataclass(frozen=True)
class Ballot:
    """The votes of one round, at most one per voter."""

    votes: Mapping[str, Vote] = field(default_factory=dict)
    two_faced: frozenset[str] = frozenset()

    def with_vote(self, vote: Vote) -> Ballot:
        """Add a vote. Repeated votes change nothing; two different votes of one voter are void."""
        known = self.votes.get(vote.voter)
        if known == vote or vote.voter in self.two_faced:
            return self
        if known is not None:
            rest = {voter: v for voter, v in self.votes.items() if voter != vote.voter}
            return Ballot(rest, self.two_faced | {vote.voter})
        return replace(self, votes={**self.votes, vote.voter: vote})

    def counted(self, base: bytes, eligible: Collection[str]) -> list[Vote]:
        """The votes on `base` by eligible voters, or by all voters if none of these is eligible."""
        on_base = [vote for vote in self.votes.values() if vote.base == base]
        return [vote for vote in on_base if vote.voter in eligible] or on_base

    def holders(self, ref: UpdateRef) -> tuple[str, ...]:
        """The voters that hold this update, on any base."""
        return tuple(sorted(v.voter for v in self.votes.values() if ref in v.listed))


def agreed_set(votes: Iterable[Vote]) -> tuple[UpdateRef, ...]:
    """The updates that more than half of the votes list, one per sender, in order of digests."""
    votes = list(votes)
    tally = Counter(ref for vote in votes for ref in vote.listed)
    chosen: dict[str, UpdateRef] = {}
    for ref in sorted(ref for ref, count in tally.items() if 2 * count > len(votes)):
        chosen.setdefault(ref.sender, ref)
    return tuple(sorted(chosen.values()))
