"""The step of a round, computed beside the event loop: what a replica knows between two rounds.

Decides when the trend is brought up to date and whose memory the next consensus is written to. What
a step is made of, who is left out and how it is named is `swarm`'s; when it is applied, the
round's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from node.log.consensus import Consensus
from node.log.fetch import Quanta
from node.log.room import Room
from node.replica.exchange import HeldUpdate
from protocol.log import Entry
from swarm.consensus.fixed_point import FixedUpdate
from swarm.consensus.log import ConsensusLog
from swarm.consensus.step import Step, next_step
from swarm.consensus.trend import Trend
from swarm.consensus.updates import snapshot_index
from swarm.rounds import actions as act


@dataclass(frozen=True)
class Computed:
    """A step that waits for the round to apply it."""

    step: Step
    payloads: list[bytes]
    index: bytes | None  # of the weights as a snapshot, if this is to be one


class Aggregation:
    """Steps of one replica. All calls are from the loop's thread."""

    def __init__(self) -> None:
        self._computed: dict[bytes, Computed] = {}  # by the digest of their entry
        self._trend, self._lock = Trend(), asyncio.Lock()
        self._room = Room()

    async def compute(
        self,
        action: act.ComputeStep,
        held: Mapping[bytes, HeldUpdate],
        log: ConsensusLog,
        consensus: Consensus,
        same_text: bool = True,
    ) -> Entry:
        """The step of a round from the updates it agreed on, `held` by their digests. It is kept
        for `apply`."""
        # All of this moment: while the lock is waited for the consensus may move on.
        weights, steps = consensus.weights, consensus.recent_steps(log)
        room = self._room.take(len(weights))
        async with self._lock:
            computed = await asyncio.to_thread(
                _computed, action, held, log, weights, steps, self._trend, room, same_text
            )
        self._computed[computed.step.entry.digest] = computed
        return computed.step.entry

    def apply(self, entry: Entry, log: ConsensusLog, consensus: Consensus) -> FixedUpdate:
        """Make a computed step; `log` has it at its head already."""
        computed = self._computed.pop(entry.digest)
        self._room.keep(consensus.weights)
        step = computed.step
        consensus.advance(entry, step.weights, step.change, computed.payloads)
        consensus.prune(log, computed.index)
        return step.change

    def forget(self, head: bytes) -> None:
        """Steps from any other head are of no use."""
        self._computed = {d: c for d, c in self._computed.items() if c.step.entry.parent == head}

    async def prepare(self, log: ConsensusLog, consensus: Consensus) -> None:
        """What the next round needs of the past. If that round comes sooner it does so itself."""
        async with self._lock:
            await asyncio.to_thread(self._trend.follow, consensus.recent_steps(log))


def _computed(
    action: act.ComputeStep,
    held: Mapping[bytes, HeldUpdate],
    log: ConsensusLog,
    weights: Quanta,
    steps: tuple[FixedUpdate, ...],
    trend: Trend,
    room: Quanta | None,
    same_text: bool,
) -> Computed:
    trend.follow(steps)
    updates = [(ref, held[ref.digest].update) for ref in action.refs]
    step = next_step(log, action.round, weights, updates, trend, same_text=same_text, room=room)
    entry = step.entry
    included = [held[c.digest].payload for c in entry.contributions if c.scale > 0]
    # Here, beside the loop: to read a gigabyte once more takes half a second.
    index = snapshot_index(step.weights) if entry in log.appended(entry).pinned() else None
    return Computed(step, included, index)
