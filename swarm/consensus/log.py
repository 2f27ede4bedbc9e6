"""The consensus of a block as a log: one entry per round, and which steps and snapshots are kept.

Also plans what to fetch to catch up or to change branches; the node fetches it.

An entry's digest covers its parent, so a signed head stands for the whole history (see
`protocol.log`). Whatever has to be equal on all replicas (who may vote, reference norms, scores) is
therefore read from here.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from protocol.limits import WORK_ONE
from protocol.log import Entry, LogError

MAX_ENTRIES = 4096
MAX_CONTRIBUTIONS = 1024


def check_chain(entries: Sequence[Entry], head: bytes) -> None:
    """Raise LogError unless the entries are linked, have ascending rounds, and end in `head`."""
    if not entries or len(entries) > MAX_ENTRIES:
        raise LogError(f"a log of {len(entries)} entries")
    for before, after in pairwise(entries):
        if after.parent != before.digest or after.round <= before.round:
            raise LogError(f"log entry of round {after.round} does not follow its parent")
    if any(len(entry.contributions) > MAX_CONTRIBUTIONS for entry in entries):
        raise LogError("log entry with too many contributions")
    if entries[-1].digest != head:
        raise LogError("log does not end in the digest that was asked for")


class MoveMode(enum.Enum):
    """What a replica keeps when it changes branches (see `swarm.consensus.forks.move_mode`)."""

    REBASE = "rebase"
    MERGE = "merge"
    KEEP = "keep"


@dataclass(frozen=True)
class MovePlan:
    """How to get to another head: roll back or start from a snapshot, then apply steps."""

    rollback: tuple[Entry, ...]  # ours, newest first
    snapshot: Entry | None  # fetch these weights instead of rolling back
    forward: tuple[Entry, ...]  # theirs, oldest first: fetch and apply their steps
    fork: Entry | None  # the common ancestor

    @property
    def known(self) -> bool:
        return self.fork is not None


@dataclass(frozen=True)
class ConsensusLog:
    """Entries, oldest first. The first may be of any round, since older ones are pruned."""

    entries: tuple[Entry, ...]
    snapshot_every: int = 16
    keep_entries: int = 1024

    @property
    def head(self) -> Entry:
        return self.entries[-1]

    def appended(self, entry: Entry) -> ConsensusLog:
        check_chain((self.head, entry), entry.digest)
        return self._with((*self.entries, entry))

    def _with(self, entries: Sequence[Entry]) -> ConsensusLog:
        kept = tuple(entries)[-self.keep_entries :]
        return ConsensusLog(kept, self.snapshot_every, self.keep_entries)

    def pinned(self) -> tuple[Entry, ...]:
        """The entries whose weights are kept as snapshots: the last two at `snapshot_every` rounds.

        Two, so that a catch-up that began before the newest pin can still finish.
        """
        first = self.entries[0]
        pins = [
            after
            for before, after in pairwise(self.entries)
            if after.round // self.snapshot_every > before.round // self.snapshot_every
        ]
        return tuple(([] if first.round >= 0 else [first]) + pins)[-2:] or (first,)

    def steps_kept(self) -> tuple[Entry, ...]:
        """The entries whose steps are kept: all since the older pinned snapshot."""
        oldest = self.pinned()[0].round
        return tuple(entry for entry in self.entries if entry.round > oldest)

    def plan_move(self, theirs: Sequence[Entry], pinned: Sequence[Entry]) -> MovePlan:
        """Plan the way from our head to theirs[-1]. `pinned`: snapshots that the donors have."""
        ours = {entry.digest: i for i, entry in enumerate(self.entries)}
        # The oldest entry names its parent too: the fork may be right before their chain.
        for i in range(len(theirs) - 1, -2, -1):
            digest = theirs[i].digest if i >= 0 else theirs[0].parent
            if digest in ours:
                fork = self.entries[ours[digest]]
                rollback = self.entries[ours[digest] + 1 :][::-1]
                forward = tuple(theirs[i + 1 :])
                have_steps = not forward or not pinned or forward[0].round > pinned[0].round
                can_roll = all(entry in self.steps_kept() for entry in rollback)
                if have_steps and can_roll:
                    return MovePlan(tuple(rollback), None, forward, fork)
                return self._from_snapshot(tuple(rollback), theirs, pinned, fork)
        return self._from_snapshot((), theirs, pinned, None)

    def _from_snapshot(
        self,
        rollback: tuple[Entry, ...],
        theirs: Sequence[Entry],
        pinned: Sequence[Entry],
        fork: Entry | None,
    ) -> MovePlan:
        usable = [entry for entry in pinned if entry in theirs]
        start = usable[-1] if usable else theirs[-1]
        forward = tuple(entry for entry in theirs if entry.round > start.round)
        return MovePlan(rollback, start, forward, fork)

    def moved(self, theirs: Sequence[Entry]) -> ConsensusLog:
        """The log on their branch: their chain, after our older entries if they link."""
        for i, entry in enumerate(self.entries):
            if entry.digest == theirs[0].digest:
                return self._with((*self.entries[:i], *theirs))
            if entry.digest == theirs[0].parent:
                return self._with((*self.entries[: i + 1], *theirs))
        return self._with(theirs)

    def since(self, digest: bytes) -> tuple[Entry, ...]:
        """Entries to send to a replica with head `digest`: from that on, or all if not found."""
        for i, entry in enumerate(self.entries):
            if entry.digest == digest:
                return self.entries[i:]
        return self.entries

    # What must be equal on all replicas.

    def recent_norms(self, window: int = 8) -> tuple[int, ...]:
        return tuple(e.median_norm for e in self.entries[-window:] if e.contributions)

    def past_scores(self, sender: str, window: int = 7) -> tuple[int, ...]:
        """The last scores of a sender, within the last 4 windows of entries."""
        found = [e.contribution_of(sender) for e in self.entries[-4 * window :]]
        return tuple(c.score for c in found if c is not None)[-window:]

    def inclusions(self, window: int = 8) -> Counter[str]:
        return Counter(
            c.sender for e in self.entries[-window:] for c in e.contributions if c.scale > 0
        )

    def replicas(self, window: int = 8) -> float:
        """The average number of hosts in the last rounds, by work: a host with a tenth of a round's
        work counts as a tenth."""
        done = [entry.work / WORK_ONE for entry in self.entries[-window:] if entry.work]
        return max(1.0, sum(done) / len(done)) if done else 1.0

    def contributors(self) -> frozenset[str]:
        """All senders with an included update in the kept entries."""
        return frozenset(c.sender for e in self.entries for c in e.contributions if c.scale > 0)

    def has_update(self, digest: bytes, window: int = 256) -> bool:
        """Whether an update was in an agreed set before, so that an offer of it is a replay."""
        return any(digest in entry.named for entry in self.entries[-window:])

    def eligible_voters(self, seniority: int = 3, window: int = 8) -> frozenset[str]:
        """Peers with a vote: senders that were included in `seniority` of the last rounds.

        In a young run, as often as the most included sender. Identities are free, so a plain count
        of voters would be worth nothing; accepted work is not free. Empty in the first round: then
        all may vote.
        """
        counts = self.inclusions(window)
        needed = min(seniority, max(counts.values(), default=0))
        return frozenset(sender for sender, count in counts.items() if count >= needed)
