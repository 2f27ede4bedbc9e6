"""Following the log of a block that one does not train: for relay copies and for assembly.

Holds the block's consensus as of a chosen round and moves it forward by the updates that went into
each round; only a first or a long-missed copy costs a snapshot. Asks several replicas and believes
what most of them say of a round; once the copy's own log names contributors, what most of those
say, as long as enough of them answer. Knows nothing of what the copy is used for.

Known limits: a first copy has no log to know contributors from. Who makes up most of the donors
then is believed, and is what the copy calls contributors afterwards. Only who says up to which
round to move (`to_round`) tells us the time: without it two contributors that stopped long ago hold
a copy back, since a block that rests looks the same.
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
ASKED_PER_LOOK_UP = 8  # so often the same donors are asked before they are looked up again
LIARS_KEPT = 256

Donors = Callable[[int], Awaitable[Sequence[str]]]


@dataclass(frozen=True)
class FollowSettings:
    """Which log, for what. `to_train`: whoever trains the block judges updates by the log's last
    steps, so a copy for that begins with the older snapshot, which has them all behind it."""

    run_id: bytes
    block: int
    codec: UpdateCodec
    snapshot_every: int
    purpose: Purpose
    ask_s: float = CONTROL_DEADLINE_S
    to_train: bool = False


class Follower:
    """A copy of one block. `donors` finds its replicas."""

    def __init__(
        self, settings: FollowSettings, first_weights: Floats, peers: Peers, donors: Donors
    ) -> None:
        self.settings, self.peers, self.donors = settings, peers, donors
        start = to_fixed(first_weights)
        first = genesis(settings.run_id.hex(), settings.block, weights_digest(start))
        self.log = ConsensusLog((first,), settings.snapshot_every)
        self.consensus = Consensus(start, settings.codec, settings.block, light=True)
        self.liars: set[str] = set()
        self._known: tuple[list[str], int] = ([], 0)  # donors, and how often to ask them still

    @property
    def round(self) -> int:
        """The round whose consensus this copy is; -1 is the run's first weights."""
        return self.log.head.round

    def weights(self) -> Floats:
        return to_float(self.consensus.weights)

    async def advance(self, to_round: int | None = None) -> bool:
        """Move to the newest consensus, or to that of `to_round`; whether there was a newer one.

        Raises `FetchError` if no replica answers: the copy stays as it was, and usable.
        """
        donors, left = self._known
        if not left:
            found = await self.donors(self.settings.block)
            donors, left = (
                [d for d in voters_first(found, self.log) if d not in self.liars][:DONORS_ASKED],
                ASKED_PER_LOOK_UP,
            )
        self._known = ([], 0)  # unless all goes well
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
        if len(self.liars) > LIARS_KEPT:  # identities are free; a liar that comes back is found out
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
        """The entry to move to, and who has it: the newest that most of the witnesses have.

        If no newer entry is with most of them: the best supported. A donor that made up rounds of
        its own is alone with them.
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
        """Whose word counts: of the donors those that may vote by our own log, if they are enough.

        Strangers may all be one person with a long log that it made up. But our log may be old,
        and most of the block another one since: two of those whom it knows speak for it, or half
        of them, and one that is left of many is a donor like the others.
        """
        there = [donor for donor in logs if not self._was_left(donor, logs, to_round)]
        voters = self.log.eligible_voters()
        known = [donor for donor in there if donor in voters]
        enough = len(known) >= 2 or 2 * len(known) >= len(voters)
        return known if known and enough else there

    def _was_left(self, donor: str, logs: dict[str, RemoteLog], to_round: int | None) -> bool:
        """Whether a donor stands no further than we do while most of the others went on for long.

        As far as rounds can have gone on: a made-up log may claim any.
        """
        if to_round is None or logs[donor].entries[-1].round > self.round:
            return False
        others = [log.entries[-1].round for name, log in logs.items() if name != donor]
        ahead = [number for number in others if min(number, to_round) > self.round + AWAY]
        return 2 * len(ahead) > len(others)
