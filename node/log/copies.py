"""The copies of other blocks that a worker reads (relay and look-ahead), renewed every round.

Chooses which version of each block a round's training reads and when to fetch it. If no replica of
a block answers, training goes on with the old copy. Following the logs is `follow.py`'s task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from node.log.consensus import Consensus
from node.log.fetch import Peers
from node.log.follow import Donors, Follower, FollowSettings
from node.machine.going_on import going_on
from node.trainer.trainer import TrainerError
from protocol.errors import WireError
from protocol.messages import Purpose
from swarm.consensus.fixed_point import Quanta
from swarm.consensus.log import ConsensusLog
from swarm.consensus.updates import UpdateCodec
from swarm.learning.coupling import followed_blocks, upstream_versions
from swarm.learning.flat import flat_size, initial_flat
from swarm.learning.worker import initial_block
from swarm.runfile import RunFile

_log = logging.getLogger(__name__)

TRIES_PER_ROUND = 6  # how often a late copy is asked for

Renew = Callable[[dict[int, Quanta]], Awaitable[None]]


class Copies:
    """Followers of all blocks that `block` reads. `renew` hands new weights to the trainer."""

    def __init__(
        self,
        run_file: RunFile,
        run_id: bytes,
        block: int,
        peers: Peers,
        donors: Donors,
        run_time_s: Callable[[], float],
        renew: Renew,
    ) -> None:
        self.run_file, self.block, self._donors = run_file, block, donors
        self.run_time_s, self.renew = run_time_s, renew
        run, exchange = run_file.run, run_file.exchange
        self.followers: dict[int, Follower] = {}
        for other in followed_blocks(run.model, block):
            codec = UpdateCodec(run_file.codecs, flat_size(initial_block(run, other)))
            settings = FollowSettings(
                run_id,
                other,
                codec,
                exchange.snapshot_every,
                Purpose.RELAY,
                ask_s=run_file.rounds.period_s / 2,
            )
            self.followers[other] = Follower(settings, initial_flat(run, other), peers, donors)
        self.muted = False  # the host is over its budget: renew nothing
        self._number = -1
        self._began = asyncio.Event()

    def adopt(self, followers: Mapping[int, Follower]) -> None:
        """Take over followers from the previous `Copies`, when this host changes its block."""
        for block, follower in followers.items():
            if block in self.followers:
                # The old callback would keep everything of the previous block in memory.
                follower.donors = self._donors
                self.followers[block] = follower

    def held(self, block: int) -> tuple[ConsensusLog, Consensus] | None:
        """The log and consensus of a block that we follow, to be served to peers."""
        follower = self.followers.get(block)
        return None if follower is None else (follower.log, follower.consensus)

    def begin(self, number: int) -> None:
        """Tell `run` that the exchange of round `number` has opened."""
        self._number = number
        self._began.set()

    def wanted(self, number: int) -> dict[int, int]:
        """Block -> the round whose consensus training reads, once round `number` has exchanged."""
        run = self.run_file.run
        versions = upstream_versions(self.block, number + 1, run.training.staggered)
        wanted = {block: version - 1 for block, version in enumerate(versions)}
        return {**wanted, self.block + 1: number}

    def ages(self, number: int) -> tuple[int, ...]:
        """How many rounds older than wanted each copy is."""
        wanted = self.wanted(number)
        return tuple(max(0, wanted[b] - f.round) for b, f in self.followers.items())

    def weights(self) -> dict[int, Quanta]:
        """The copies that we have. For other blocks training reads the run's initial weights."""
        return {b: f.consensus.weights for b, f in self.followers.items() if f.round >= 0}

    async def catch_up(self, number: int) -> None:
        """Fetch the copies that replicas read in round `number`, which holds our first step.

        Trained on the initial weights instead, a block would adapt to inputs that no other replica
        has. A block with no answering replica is not waited for.
        """
        wanted = self.wanted(number - 1)
        late = [block for block, f in self.followers.items() if f.round < wanted[block]]
        await asyncio.gather(*(self._advance(block, wanted[block]) for block in late))

    async def run(self) -> None:
        """Renew the copies round after round, until cancelled."""
        period_s = self.run_file.rounds.period_s
        while True:
            await self._began.wait()
            self._began.clear()
            number = self._number
            await asyncio.sleep(max(0.0, self._ready_s(number) - self.run_time_s()))
            while number == self._number and not self.muted:
                await self._renew(number)
                if not any(self.ages(number)):
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(period_s / TRIES_PER_ROUND):
                        await self._began.wait()

    def _ready_s(self, number: int) -> float:
        """The earliest time at which the consensus of round `number` can exist."""
        rules = self.run_file.rounds
        opened_s = rules.start_s + number * rules.period_s
        return opened_s + rules.deadline_floor_s + rules.vote_window_s

    async def _renew(self, number: int) -> None:
        wanted = self.wanted(number)
        late = [block for block, f in self.followers.items() if f.round < wanted[block]]
        moved = await asyncio.gather(*(self._advance(block, wanted[block]) for block in late))
        followers = {b: self.followers[b] for b, did in zip(late, moved, strict=True) if did}
        for block, follower in followers.items():
            with suppress(TrainerError):  # a restarted trainer gets all copies again
                await self.renew({block: follower.consensus.weights})

    async def _advance(self, block: int, to_round: int) -> bool:
        follower = self.followers[block]
        with going_on(_log, "following another block"):
            try:
                async with asyncio.timeout(self.run_file.rounds.period_s):
                    return await follower.advance(to_round)
            except (WireError, TimeoutError) as error:
                _log.info("block %d: its copy stays at round %d: %s", block, follower.round, error)
        return False
