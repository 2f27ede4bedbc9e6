"""The running weights of a replica, and the ledger that holds for them at every moment.

    weights = consensus + unsent            (swarm.feedback)

Decides how the identity survives what a live host goes through: corrections, updates and saves in
one order, a training process that dies with an update in flight, a resume from disk. Knows nothing
of rounds and peers; the replica says what to add and when to make an update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from node.consensus import Consensus
from node.own_updates import OwnUpdate, OwnUpdates
from node.trainer import TrainerError
from node.weights_queue import WeightsQueue
from swarm.feedback import unsent_weights
from swarm.fixed_point import QUANTUM_BITS, SEGMENT, FixedUpdate, add_into, scaled
from swarm.flat import Floats
from swarm.log import ConsensusLog
from swarm.votes import UpdateRef

Parts = list[tuple[FixedUpdate, int]]  # what to add to the weights, each so many times


class Weights(Protocol):
    """What is needed of the trainer."""

    async def snapshot(self) -> Floats: ...

    async def correct(self, change: Floats) -> None: ...

    async def replace(self, flat: Floats) -> None: ...


@dataclass(frozen=True)
class Moment:
    """A log, its consensus, and our updates in flight, when the running weights are at rest:
    the ledger holds for exactly these three."""

    log: ConsensusLog
    consensus: Consensus
    in_flight: dict[UpdateRef, OwnUpdate]


class RunningWeights:
    """The trainer's weights behind their queue, and our own updates that are in them."""

    def __init__(self, trainer: Weights, on_lost: Callable[[str], None]) -> None:
        self.trainer = trainer
        self.own = OwnUpdates()
        self.queue = WeightsQueue(on_lost)

    def own_part(self, ref: UpdateRef, scale: int, times: int) -> Parts:
        """A part of an update of ours, if the weights contain it."""
        made = self.own.get(ref)
        return [(scaled(made.update, scale), times)] if made and scale else []

    def correct(self, parts: Parts) -> None:
        """Queue a correction."""
        if not parts:
            return

        async def correct() -> None:
            change = await asyncio.to_thread(_summed, parts)
            if change is not None:
                await self.trainer.correct(change)

        self.queue.put(correct)

    def make_update(
        self,
        consensus: Consensus,
        in_flight: Sequence[UpdateRef],
        use: Callable[[Floats], Awaitable[tuple[UpdateRef, OwnUpdate]]],
    ) -> None:
        """Queue an update: `use` turns what is unsent, without `in_flight`, into one."""
        weights = consensus.weights
        waiting = [made.update for ref in in_flight if (made := self.own.get(ref))]

        async def make() -> None:
            running = await self.trainer.snapshot()
            if not np.isfinite(running).all():
                self.queue.lose("training diverged: weights that are not numbers")
                return
            rest = await asyncio.to_thread(unsent_weights, running, weights, waiting)
            self.own.add(*await use(rest))

        self.queue.put(make)

    async def at_rest(
        self, log: ConsensusLog, consensus: Consensus, work: Callable[[Moment], Awaitable[None]]
    ) -> None:
        """Do something when all that led to this consensus is in the weights, and no more.

        Raises what `work` raises, and `TrainerError` if the weights are lost.
        """
        then = consensus.copy()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def now() -> None:
            if done.done():
                return  # nobody waits for it any more
            try:
                await work(Moment(log, then, self.own.in_flight(log)))
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(None)

        def skipped() -> None:
            if not done.done():
                done.set_exception(TrainerError("the training process is not running"))

        self.queue.put(now, skipped)
        await done

    def reset(self, log: ConsensusLog, consensus: Consensus) -> None:
        """Set the weights to the consensus and what is in flight: all else is lost.

        To the consensus alone would be wrong: when the update in flight is settled it is taken out
        of the weights, and the next update would undo it for everybody.
        """
        self.own.keep_only(log)
        weights = consensus.weights

        async def reset() -> None:
            total = weights.astype(np.int64)
            for made in self.own.in_flight(log).values():
                add_into(total, made.update)
            await self.trainer.replace((total * 2.0**-QUANTUM_BITS).astype(np.float32))

        self.queue.put_reset(reset)


def _summed(parts: Parts) -> Floats | None:
    """The sum as floats, or None if it is nothing. Its rounding shows up in what is unsent."""
    change = np.zeros(parts[0][0].size, dtype=np.float32)
    for update, times in parts:
        unit = times * 2.0**-QUANTUM_BITS
        if update.indices is not None:
            change[update.indices] += (update.values * unit).astype(np.float32)
            continue
        for start in range(0, len(change), SEGMENT):
            change[start : start + SEGMENT] += update.values[start : start + SEGMENT] * unit
    return change if change.any() else None
