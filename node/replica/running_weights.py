"""The running weights of a replica, and the ledger that holds for them at every moment.

    weights + aside = consensus + unsent            (swarm.consensus.feedback)

Decides how the identity survives what a live host goes through: corrections, updates and saves in
one order, a training process that dies with an update in flight, a resume from disk. Knows nothing
of rounds and peers; the replica says what to add and when to make an update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from node.log.consensus import Consensus
from node.replica.own_updates import OwnUpdate, OwnUpdates
from node.trainer.trainer import TrainerError
from node.trainer.weights_queue import WeightsQueue
from protocol.codec import NonFiniteError
from protocol.votes import UpdateRef
from swarm.consensus.feedback import Unsent, set_aside
from swarm.consensus.fixed_point import (
    QUANTUM_BITS,
    SEGMENT,
    FixedUpdate,
    Halves,
    add_into,
    scaled,
)
from swarm.consensus.log import ConsensusLog
from swarm.learning.flat import Change, Floats

Parts = list[tuple[FixedUpdate, int]]  # what to add to the weights, each so many times


class Weights(Protocol):
    """What is needed of the trainer."""

    def held(self) -> AbstractAsyncContextManager[Floats]:
        """The running weights, between two steps. They are what they are until the context ends;
        other orders wait for that."""

    async def correct(self, changes: Sequence[Change]) -> None:
        """Add these to the running weights, all of them between the same two steps."""

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
        self.aside: Halves | None = None  # in none of the weights, and not sent yet

    def own_part(self, ref: UpdateRef, scale: int, times: int) -> Parts:
        """A part of an update of ours, if the weights contain it."""
        made = self.own.get(ref)
        return [(scaled(made.update, scale), times)] if made and scale else []

    def correct(self, parts: Parts) -> None:
        """Queue a correction."""
        if not parts:
            return

        async def correct() -> None:
            changes = await asyncio.to_thread(_as_changes, parts)
            if changes:
                await self.trainer.correct(changes)

        self.queue.put(correct)

    def make_update(
        self,
        consensus: Consensus,
        in_flight: Sequence[UpdateRef],
        use: Callable[[Unsent], Awaitable[tuple[UpdateRef, OwnUpdate]]],
        aside_share: float = 0.0,
    ) -> None:
        """Queue an update: `use` turns what is unsent, without `in_flight`, into one. Of what it
        leaves, so much is put aside.

        It may raise `NonFiniteError`: then there is nothing in these weights to go on from.
        """
        weights = consensus.weights
        waiting = [made.update for ref in in_flight if (made := self.own.get(ref))]

        async def make() -> None:
            try:
                async with self.trainer.held() as running:
                    rest = Unsent(running, weights, waiting, self.aside)
                    made = await use(rest)
                    sent = made[1].update
                    aside, change = await asyncio.to_thread(set_aside, rest, sent, aside_share)
            except NonFiniteError:
                self.queue.lose("training diverged: weights that are not numbers")
                return
            self.own.add(*made)
            if change is not None:
                await self.trainer.correct([Change(None, change)])
            self.aside = aside

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
                await self._without_aside(work, Moment(log, then, self.own.in_flight(log)))
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

    async def _without_aside(
        self, work: Callable[[Moment], Awaitable[None]], moment: Moment
    ) -> None:
        """With what was aside in the weights: whoever saves them has all that was learned."""
        if self.aside is None:
            await work(moment)
            return
        aside = self.aside.astype(np.float32)
        await self._correct_or_lose(aside)
        try:
            await work(moment)
        finally:
            await self._correct_or_lose(-aside)

    async def _correct_or_lose(self, values: Floats) -> None:
        """Whether a correction that failed was made nobody knows: the weights are lost."""
        try:
            await self.trainer.correct([Change(None, values)])
        except TrainerError as error:
            self.queue.lose(error.message)
            raise

    def reset(self, log: ConsensusLog, consensus: Consensus) -> None:
        """Set the weights to the consensus and what is in flight: all else is lost.

        To the consensus alone would be wrong: when the update in flight is settled it is taken out
        of the weights, and the next update would undo it for everybody.
        """
        self.own.keep_only(log)
        weights = consensus.weights

        async def reset() -> None:
            self.aside = None
            total = weights.astype(np.int64)
            for made in self.own.in_flight(log).values():
                add_into(total, made.update)
            await self.trainer.replace((total * 2.0**-QUANTUM_BITS).astype(np.float32))

        self.queue.put_reset(reset)


def _as_changes(parts: Parts) -> list[Change]:
    """The parts as floats, without what is nothing. Their rounding shows up in what is unsent."""
    changes = []
    for update, times in parts:
        values = np.empty(len(update.values), dtype=np.float32)
        for start in range(0, len(values), SEGMENT):  # in the cache
            part = update.values[start : start + SEGMENT] * (times * 2.0**-QUANTUM_BITS)
            values[start : start + SEGMENT] = part
        if values.any():
            changes.append(Change(update.indices, values))
    return changes
