"""A block's consensus as this host holds it: the weights now, the steps back, what it serves.

Decides which data of the log is kept in memory: the steps and encoded updates since the older
pinned snapshot, and the two snapshots. The log itself, and what an entry means, is `swarm.log`'s.
Arrays are never changed in place: whoever holds one has a version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from node.fetch import Pin, Quanta
from protocol.frames import content_digest
from swarm.fixed_point import FixedUpdate, Ints, add_into, summed, weights_digest
from swarm.log import ConsensusLog, Entry, LogError
from swarm.updates import UpdateCodec, replay, snapshot_shards

TREND_ROUNDS = 8


@dataclass(frozen=True)
class Snapshot:
    """The weights of a pinned entry, cut for serving."""

    pin: Pin
    index: bytes
    shards: tuple[memoryview, ...]


class Consensus:
    """The weights of one block at the head of a log, and the way to its older versions."""

    def __init__(self, weights: Quanta, codec: UpdateCodec, block: int) -> None:
        self.weights = weights
        self.codec, self.block = codec, block
        self.steps: dict[bytes, FixedUpdate] = {}  # entry digest -> its step
        self.updates: dict[bytes, list[bytes]] = {}  # entry digest -> the encoded updates in it
        self.snapshots: dict[bytes, Snapshot] = {}  # entry digest -> its weights

    def copy(self) -> Consensus:
        """This version, whatever becomes of the original. The arrays are shared."""
        other = Consensus(self.weights, self.codec, self.block)
        other.steps, other.updates = dict(self.steps), dict(self.updates)
        other.snapshots = dict(self.snapshots)
        return other

    def trend(self, log: ConsensusLog) -> FixedUpdate | None:
        """The sum of `recent_steps`, or None."""
        recent = self.recent_steps(log)
        return summed([(step, 1) for step in recent]) if recent else None

    def recent_steps(self, log: ConsensusLog) -> tuple[FixedUpdate, ...]:
        """The last steps, whose sum is the trend; every replica of this head must get the same one.

        So it begins no earlier than the older snapshot: that is where newcomers begin. Empty while
        the run is younger than its first step, or if we hold too few steps (we had to start from
        the newer snapshot): then our step may differ from the others', and we will move to theirs.
        """
        recent = log.steps_kept()[-TREND_ROUNDS:]
        if any(entry.digest not in self.steps for entry in recent):
            return ()
        return tuple(self.steps[entry.digest] for entry in recent)

    def advance(
        self, entry: Entry, new: Quanta, step: FixedUpdate, updates: Sequence[bytes]
    ) -> None:
        """Make a step that was computed here: `new` are the weights after it."""
        self.weights = new
        self.steps[entry.digest], self.updates[entry.digest] = step, list(updates)

    def follow(self, entry: Entry, updates: Sequence[bytes]) -> None:
        """Make a step from the updates that went into it, as a follower does."""
        new, step = replay(self.weights, entry, updates, self.codec, self.block)
        self.advance(entry, new, step, updates)

    def roll_back(self, entry: Entry) -> None:
        step = self.steps.pop(entry.digest)
        self.updates.pop(entry.digest, None)
        back = self.weights.astype(np.int64)
        add_into(back, step, -1)
        self.weights = back.astype(np.int32)

    def before(self, undone: Sequence[Entry]) -> Ints | None:
        """The weights before these entries (newest first), or None if their steps are not here."""
        if any(entry.digest not in self.steps for entry in undone):
            return None
        back = self.weights.astype(np.int64)
        for entry in undone:
            add_into(back, self.steps[entry.digest], -1)
        return back

    def restart(self, entry: Entry, weights: Quanta) -> None:
        """Start from a snapshot."""
        if weights_digest(weights) != entry.weights:
            raise LogError(f"the snapshot of round {entry.round} is not its consensus")
        self.weights = weights
        self.steps.clear()
        self.updates.clear()
        self.snapshots.clear()

    def go_on(self, log: ConsensusLog, start: Entry, data: Mapping[bytes, Sequence[bytes]]) -> None:
        """From the weights of `start`, which we hold, to the head of `log`; pin on the way."""
        pinned = {entry.digest for entry in log.pinned()}
        if start.digest in pinned and start.digest not in self.snapshots:
            self._pin(start)
        for entry in log.entries:
            if entry.round > start.round:
                self.follow(entry, data.get(entry.digest, ()))
                if entry.digest in pinned:
                    self._pin(entry)
        self.prune(log)

    def prune(self, log: ConsensusLog) -> None:
        """Take a snapshot if one is due, and forget what nobody may ask for any more."""
        pinned = {entry.digest for entry in log.pinned()}
        if log.head.digest in pinned and log.head.digest not in self.snapshots:
            self._pin(log.head)
        self.snapshots = {d: s for d, s in self.snapshots.items() if d in pinned}
        kept = {entry.digest for entry in log.steps_kept()}
        for held in (self.steps, self.updates):
            for digest in [d for d in held if d not in kept]:
                del held[digest]

    def _pin(self, entry: Entry) -> None:
        index, shards = snapshot_shards(self.weights)
        pin = Pin(entry.round, entry.digest, content_digest(index))
        self.snapshots[entry.digest] = Snapshot(pin, index, tuple(shards))

    def snapshot_named(self, name: bytes) -> Snapshot | None:
        return next((s for s in self.snapshots.values() if s.pin.name == name), None)

    def oldest_start(self, log: ConsensusLog) -> tuple[Entry, Snapshot] | None:
        """The oldest snapshot from which we hold every step to the head."""
        for entry in log.pinned():
            snapshot = self.snapshots.get(entry.digest)
            later = [e for e in log.entries if e.round > entry.round]
            if snapshot is not None and all(e.digest in self.steps for e in later):
                return entry, snapshot
        return None
