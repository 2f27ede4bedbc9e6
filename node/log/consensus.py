"""A block's consensus as this host holds it: the weights now, the steps back, what it serves.

Decides which data of the log is kept in memory: the encoded updates since the older pinned snapshot
and, of a block that this host trains, the newest steps and the two snapshots. Steps are up to fifty
times as large as the updates that they were made of, so an older one is made again when it is asked
for; of a block that is only followed (`light`) so are all of them, and the snapshots. The log
itself, and what an entry means, is `swarm.consensus.log`'s. Arrays are never changed in place:
whoever holds one has a version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from node.log.fetch import Quanta
from protocol.digests import weights_digest
from protocol.frames import content_digest
from protocol.log import Entry, LogError, Pin
from swarm.consensus.fixed_point import FixedUpdate, Ints, add_into
from swarm.consensus.log import ConsensusLog
from swarm.consensus.step import TREND_ROUNDS
from swarm.consensus.updates import UpdateCodec, replay, replayed_step, shards_of, snapshot_index

Shards = tuple[memoryview, ...]


@dataclass(frozen=True)
class Snapshot:
    """A pinned entry as it is served; without its weights if they can be made again."""

    pin: Pin
    index: bytes
    weights: Quanta | None = None

    @property
    def shards(self) -> Shards:
        """Views on the weights."""
        return () if self.weights is None else tuple(shards_of(self.weights))


class Consensus:
    """The weights of one block at the head of a log, and the way to its older versions."""

    def __init__(
        self, weights: Quanta, codec: UpdateCodec, block: int, light: bool = False
    ) -> None:
        self.weights = weights
        self.codec, self.block, self.light = codec, block, light
        self.steps: dict[bytes, FixedUpdate] = {}  # entry digest -> its step, of the newest
        self.updates: dict[bytes, list[bytes]] = {}  # entry digest -> the encoded updates in it
        self.snapshots: dict[bytes, Snapshot] = {}  # entry digest -> its weights
        self._again: dict[bytes, Quanta] = {}  # light: snapshots that were asked for, by name
        self._asked = False

    def copy(self) -> Consensus:
        """This version, whatever becomes of the original. The arrays are shared."""
        other = Consensus(self.weights, self.codec, self.block, self.light)
        other.steps, other.updates = dict(self.steps), dict(self.updates)
        other.snapshots = dict(self.snapshots)
        other._again, other._asked = dict(self._again), self._asked
        return other

    def whole(self, log: ConsensusLog) -> Consensus:
        """A copy as it is held of a block that is trained."""
        other = self.copy()
        other.light = False
        for digest, held in self.snapshots.items():
            weights = self.snapshot_weights(log, held)
            if weights is not None:
                other.snapshots[digest] = Snapshot(held.pin, held.index, weights)
            else:
                del other.snapshots[digest]
        other._fill_steps(log)
        return other

    def recent_steps(self, log: ConsensusLog) -> tuple[FixedUpdate, ...]:
        """The last steps, whose sum is the trend; every replica of this head must get the same one.

        So it begins no earlier than the older snapshot: that is where newcomers begin. Empty while
        the run is younger than its first step, or if we hold too few steps (we had to start from
        the newer snapshot): then our step may differ from the others', and we will move to theirs.
        """
        recent = [self.step_of(entry) for entry in log.steps_kept()[-TREND_ROUNDS:]]
        return tuple(step for step in recent if step is not None) if None not in recent else ()

    def step_of(self, entry: Entry) -> FixedUpdate | None:
        """The step of an entry, made again from its updates if need be; None if it cannot be."""
        held = self.steps.get(entry.digest)
        if held is None and entry.digest in self.updates:
            updates = self.updates[entry.digest]
            return replayed_step(entry, updates, self.codec, self.block)
        return held

    def _fill_steps(self, log: ConsensusLog) -> None:
        """Hold the steps that the next judgement of updates needs, and no others."""
        newest = () if self.light else log.steps_kept()[-TREND_ROUNDS:]
        found = ((entry.digest, self.step_of(entry)) for entry in newest)
        self.steps = {digest: step for digest, step in found if step is not None}

    def advance(
        self, entry: Entry, new: Quanta, step: FixedUpdate, updates: Sequence[bytes]
    ) -> None:
        """Make a step that was computed here: `new` are the weights after it."""
        self.weights = new
        self.updates[entry.digest] = list(updates)
        if not self.light:
            self.steps[entry.digest] = step
            for old in list(self.steps)[:-TREND_ROUNDS]:
                del self.steps[old]

    def follow(self, entry: Entry, updates: Sequence[bytes]) -> None:
        """Make a step from the updates that went into it, as a follower does."""
        new, step = replay(self.weights, entry, updates, self.codec, self.block)
        self.advance(entry, new, step, updates)

    def roll_back(self, undone: Sequence[Entry]) -> bool:
        """Undo these entries (newest first). False, and nothing changes, if their steps are not
        here."""
        back = self.before(undone)
        if back is None:
            return False
        self.weights = back.astype(np.int32)
        for entry in undone:
            self.steps.pop(entry.digest, None)
            self.updates.pop(entry.digest, None)
        return True

    def before(self, undone: Sequence[Entry]) -> Ints | None:
        """The weights before these entries (newest first), or None if their steps are not here."""
        back = self.weights.astype(np.int64)
        for entry in undone:
            step = self.step_of(entry)
            if step is None:
                return None
            add_into(back, step, -1)
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

    def prune(self, log: ConsensusLog, index: bytes | None = None) -> None:
        """Take a snapshot if one is due, and forget what nobody may ask for any more.

        `index` is the snapshot's, if somebody has made it already: it takes a while.
        """
        pinned = {entry.digest for entry in log.pinned()}
        if log.head.digest in pinned and log.head.digest not in self.snapshots:
            self._pin(log.head, index)
        self.snapshots = {d: s for d, s in self.snapshots.items() if d in pinned}
        kept = {entry.digest for entry in log.steps_kept()}
        for digest in [d for d in self.updates if d not in kept]:
            del self.updates[digest]
        self._fill_steps(log)
        if not self._asked:
            self._again = {}
        self._asked = False

    def _pin(self, entry: Entry, index: bytes | None = None) -> None:
        index = index or snapshot_index(self.weights)
        pin = Pin(entry.round, entry.digest, content_digest(index))
        self.snapshots[entry.digest] = Snapshot(pin, index, None if self.light else self.weights)

    def snapshot_weights(self, log: ConsensusLog, snapshot: Snapshot) -> Quanta | None:
        """Those of a snapshot; None if they cannot be made again. May take seconds.

        They are kept until nobody has asked for them between two rounds.
        """
        if snapshot.weights is not None:
            return snapshot.weights
        self._asked = True
        name = snapshot.pin.snapshot
        if name not in self._again:
            back = self.before([e for e in reversed(log.entries) if e.round > snapshot.pin.round])
            if back is None:
                return None
            weights = back.astype(np.int32)
            if snapshot_index(weights) != snapshot.index:
                return None
            self._again[name] = weights
        return self._again[name]

    def snapshot_named(self, name: bytes) -> Snapshot | None:
        return next((s for s in self.snapshots.values() if s.pin.snapshot == name), None)

    def oldest_start(self, log: ConsensusLog) -> tuple[Entry, Snapshot] | None:
        """The oldest snapshot from which we hold every step to the head."""
        for entry in log.pinned():
            snapshot = self.snapshots.get(entry.digest)
            later = [e for e in log.entries if e.round > entry.round]
            if snapshot is not None and all(e.digest in self.updates for e in later):
                return entry, snapshot
        return None
