"""Follow the log of a block that this host does not train, for relay copies and for assembly.

A follower holds the block's consensus as of some round and moves it forward by replaying the
updates of each round; only a first copy, or one far behind, fetches a snapshot. It asks several
replicas and takes the entry that most of them have. Once its own log names contributors, only
theirs count, as long as enough of them answer.

Known limits: a first copy knows no contributors yet, so a majority of dishonest donors is believed
and counts as the contributors from then on. Without `to_round` a follower does not know how far the
run is: two contributors that stopped long ago then hold it back, since an idle block looks the
same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from node.log.catch_up import consensus_at
from node.log.consensus import Consensus
from node.log.fetch import FetchError, LogFetcher, Peers, RemoteLog
from node.machine.going_on import going_on
from node.network.standing import voters_first
from protocol.digests import weights_digest
from protocol.errors import WireError
from protocol.limits import CONTROL_DEADLINE_S
from protocol.log import Entry, genesis
from protocol.messages import Purpose
from swarm.consensus.fixed_point import to_fixed, to_float
from swarm.consensus.forks import AWAY
from swarm.consensus.log import ConsensusLog
from swarm.consensus.updates import UpdateCodec
from swarm.learning.flat import Floats

_log = logging.getLogger(__name__)

DONORS_ASKED = 4
ASKED_PER_LOOK_UP = 8  # times that the same donors are asked before donors are looked up again
LIARS_KEPT = 256

Donors = Callable[[int], Awaitable[Sequence[str]]]


@dataclass(frozen=True)
class FollowSettings:
    """Which log to follow and for what purpose.

    `to_train`: start from the older snapshot, since judging updates takes the steps after it.
    """

    run_id: bytes
    block: int
    codec: UpdateCodec
    snapshot_every: int
    purpose: Purpose
    ask_s: float = CONTROL_DEADLINE_S
    to_train: bool = False


class Follower:
    """A copy of one block that follows its log. `donors` finds replicas of a block."""

    def __init__(
        self, settings: FollowSettings, first_weights: Floats, peers: Peers, donors: Donors
    ) -> None:
        self.settings, self.peers, self.donors = settings, peers, donors
        start = to_fixed(first_weights)
        first = genesis(settings.run_id.hex(), settings.block, weights_digest(start))
        self.log = ConsensusLog((first,), settings.snapshot_every)
        self.consensus = Consensus(start, settings.codec, settings.block, light=True)
        self.liars: set[str] = set()
        self._known: tuple[list[str], int] = ([], 0)  # donors, and how often they may still be used

    @property
    def round(self) -> int:
        """The round whose consensus this copy is; -1 for the run's initial weights."""
        return self.log.head.round

    def weights(self) -> Floats:
        return to_float(self.consensus.weights)

    async def advance(self, to_round: int | None = None) -> bool:
        """Move to the newest consensus, at most that of `to_round`. Return whether it moved.

        Raises `FetchError` if no replica answers; the copy stays usable as it was.
        """
        donors, left = self._known
        if not left:
            found = await self.donors(self.settings.block)
            donors, left = (
                [d for d in voters_first(found, self.log) if d not in self.liars][:DONORS_ASKED],
                ASKED_PER_LOOK_UP,
            )
        self._known = ([], 0)  # set again below if all donors answer
        fetcher = self._fetcher()
        logs = await self._ask_all(fetcher, donors)
        chosen, supporters = self._choose(logs, to_round)
        if len(logs) == len(donors):
            self._known = (donors, left - 1)
        if chosen is None or chosen.digest == self.log.head.digest:
            return False
        remote = logs[supporters[0]]
        cut = [e.digest for e in remote.entries].index(chosen.digest)
        entries = remote.entries[: cut + 1]
        pins = remote.starts(entries)[: 1 if self.settings.to_train else None]
        try:
            # A failure on the way leaves the old copy as it was.
            moved = await consensus_at(fetcher, supporters, self.log, self.consensus, entries, pins)
        except FetchError as error:
            self._distrust(error.liars)
            raise
        self._distrust(fetcher.liars)
        self.log, self.consensus = self.log.moved(entries), moved
        return True

    def _distrust(self, liars: Sequence[str]) -> None:
        if liars:
            self._known = ([], 0)
        self.liars.update(liars)
        if len(self.liars) > LIARS_KEPT:  # identities are free; a returning liar is caught again
            self.liars = set(liars)

    def _fetcher(self) -> LogFetcher:
        s = self.settings
        return LogFetcher(self.peers, s.run_id, s.block, s.codec, s.purpose, s.ask_s)

    async def _ask_all(self, fetcher: LogFetcher, donors: Sequence[str]) -> dict[str, RemoteLog]:
        async def ask(donor: str) -> RemoteLog | None:
            with going_on(_log, "asking for a log", WireError):
                return await fetcher.log([donor], self.log.head.digest, None)
            return None

        answers = await asyncio.gather(*(ask(donor) for donor in donors))
        logs = {d: a for d, a in zip(donors, answers, strict=True) if a is not None}
        if not logs:
            raise FetchError(f"no replica of block {self.settings.block} answers")
        return logs

    def _choose(
        self, logs: dict[str, RemoteLog], to_round: int | None
    ) -> tuple[Entry | None, list[str]]:
        """The entry to move to (None if there is none), and the donors that have it.

        It is the newest entry that a majority of the witnesses have; without one, the newest that
        any witness has. A donor that invents rounds is the only one to have them.
        """
        witnesses = self._witnesses(logs, to_round)
        holders: dict[bytes, list[str]] = {}
        newer: dict[bytes, Entry] = {}
        for donor, remote in logs.items():
            for entry in remote.entries:
                if entry.round > self.round and (to_round is None or entry.round <= to_round):
                    holders.setdefault(entry.digest, []).append(donor)
                    newer[entry.digest] = entry

        def supported(entry: Entry) -> int:
            return sum(donor in witnesses for donor in holders[entry.digest])

        def rank(entry: Entry) -> tuple[bool, int, int, bytes]:
            supporters = supported(entry)
            return 2 * supporters > len(witnesses), entry.round, supporters, entry.digest

        best = max(filter(supported, newer.values()), key=rank, default=None)
        return best, voters_first(holders[best.digest], self.log) if best else []

    def _witnesses(self, logs: dict[str, RemoteLog], to_round: int | None) -> list[str]:
        """The donors whose logs count: those with a vote by our own log, if there are enough.

        Strangers may all be one attacker with a long invented log. But our log may be old and the
        block's replicas may have changed: so at least two of its voters must have answered, or
        half of them. With fewer, all donors count alike.
        """
        there = [donor for donor in logs if not self._was_left(donor, logs, to_round)]
        voters = self.log.eligible_voters()
        known = [donor for donor in there if donor in voters]
        enough = len(known) >= 2 or 2 * len(known) >= len(voters)
        return known if known and enough else there

    def _was_left(self, donor: str, logs: dict[str, RemoteLog], to_round: int | None) -> bool:
        """Whether a donor is no further than we are while most others are far ahead.

        The others count as ahead only up to `to_round`: an invented log may claim any round.
        """
        if to_round is None or logs[donor].entries[-1].round > self.round:
            return False
        others = [log.entries[-1].round for name, log in logs.items() if name != donor]
        ahead = [number for number in others if min(number, to_round) > self.round + AWAY]
        return 2 * len(ahead) > len(others)
