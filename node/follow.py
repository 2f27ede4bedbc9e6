"""Following the log of a block that one does not train: for relay copies and for assembly.

Holds the block's consensus as of a chosen round and moves it forward by the updates that went into
each round; only a first or a long-missed copy costs a snapshot. Asks several replicas and believes
what most of them say of a round. Knows nothing of what the copy is used for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from node.consensus import Consensus
from node.fetch import FetchError, LogFetcher, Peers, RemoteLog
from protocol.errors import WireError
from protocol.messages import Purpose
from swarm.aggregate import to_fixed, to_float, weights_digest
from swarm.flat import Floats
from swarm.log import ConsensusLog, Entry, MovePlan, candidates, genesis
from swarm.updates import UpdateCodec

DONORS_ASKED = 4

Donors = Callable[[int], Awaitable[Sequence[str]]]


@dataclass(frozen=True)
class FollowSettings:
    """Which log, for what."""

    run_id: bytes
    block: int
    codec: UpdateCodec
    snapshot_every: int
    purpose: Purpose


class Follower:
    """A copy of one block. `donors` finds its replicas."""

    def __init__(
        self, settings: FollowSettings, first_weights: Floats, peers: Peers, donors: Donors
    ) -> None:
        self.settings, self.peers, self.donors = settings, peers, donors
        start = to_fixed(first_weights)
        first = genesis(settings.run_id.hex(), settings.block, weights_digest(start))
        self.log = ConsensusLog((first,), settings.snapshot_every)
        self.consensus = Consensus(start, settings.codec, settings.block)
        self.liars: set[str] = set()

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
        found = await self.donors(self.settings.block)
        donors = [d for d in found if d not in self.liars][:DONORS_ASKED]
        fetcher = self._fetcher()
        logs = await self._ask_all(fetcher, donors)
        chosen, supporters = self._choose(logs, to_round)
        if chosen is None or chosen.digest == self.log.head.digest:
            return False
        remote = logs[supporters[0]]
        cut = [e.digest for e in remote.entries].index(chosen.digest)
        entries = remote.entries[: cut + 1]
        try:
            await self._move(fetcher, supporters, entries, remote)
        finally:
            self.liars.update(fetcher.liars)
        return True

    def _fetcher(self) -> LogFetcher:
        s = self.settings
        return LogFetcher(self.peers, s.run_id, s.block, s.codec, s.purpose)

    async def _ask_all(self, fetcher: LogFetcher, donors: Sequence[str]) -> dict[str, RemoteLog]:
        async def ask(donor: str) -> RemoteLog | None:
            try:
                return await fetcher.log([donor], self.log.head.digest, None)
            except WireError:
                return None

        answers = await asyncio.gather(*(ask(donor) for donor in donors))
        logs = {d: a for d, a in zip(donors, answers, strict=True) if a is not None}
        if not logs:
            raise FetchError(f"no replica of block {self.settings.block} answers")
        return logs

    def _choose(
        self, logs: dict[str, RemoteLog], to_round: int | None
    ) -> tuple[Entry | None, list[str]]:
        """The entry to move to, and who has it: what most donors say, the newest among equals."""
        heads: dict[str, Entry] = {}
        for donor, remote in logs.items():
            due = [e for e in remote.entries if to_round is None or e.round <= to_round]
            if due and due[-1].round > self.round:
                heads[donor] = due[-1]
        if not heads:
            return None, []
        newest = max(entry.round for entry in heads.values())
        counts = Counter(e.digest for e in heads.values() if e.round == newest)
        best = candidates(counts, 1)[0]
        supporters = [donor for donor, entry in heads.items() if entry.digest == best]
        return heads[supporters[0]], supporters

    async def _move(
        self,
        fetcher: LogFetcher,
        donors: Sequence[str],
        entries: tuple[Entry, ...],
        remote: RemoteLog,
    ) -> None:
        by_digest = {entry.digest: entry for entry in entries}
        pins = [pin for pin in remote.pins if pin.entry in by_digest]
        plan = self.log.plan_move(entries, [by_digest[pin.entry] for pin in pins])
        base = Consensus(self.consensus.weights, self.settings.codec, self.settings.block)
        base.steps, base.updates = dict(self.consensus.steps), dict(self.consensus.updates)
        if plan.snapshot is None:
            for entry in plan.rollback:
                base.roll_back(entry)
        else:
            pin = next((p for p in pins if p.entry == plan.snapshot.digest), None)
            if pin is None:
                raise FetchError("no donor has a snapshot to start from", fetcher.liars)
            weights = await fetcher.snapshot(donors, pin, len(base.weights))
            base.restart(plan.snapshot, weights)
        await self._forward(fetcher, donors, base, plan)
        # Only now: a failure on the way leaves the old copy as it was.
        self.log = self.log.moved(entries)
        base.prune(self.log)
        self.consensus = base

    async def _forward(
        self, fetcher: LogFetcher, donors: Sequence[str], base: Consensus, plan: MovePlan
    ) -> None:
        for entry in plan.forward:
            updates = await fetcher.aggregate(donors, entry)
            base.follow(entry, updates)
