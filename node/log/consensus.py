"""A block's consensus in memory: its current weights, and the data behind the entries of its log.

Kept are the encoded updates since the older pinned snapshot and, for a block that this host trains,
the newest steps and the two snapshots. A step is up to fifty times as large as the updates that it
was made of, so older steps are recomputed on request; for a block that is only followed (`light`)
all steps and snapshots are. The entries themselves are `swarm.consensus.log`'s. Arrays are never
changed in place, so a reference to one is a version.
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
    """A pinned entry as it is served. `weights` is None if they are recomputed on request."""

    pin: Pin
    index: bytes
    weights: Quanta | None = None

    @property
    def shards(self) -> Shards:
        """The weights cut into shards (views, not copies); empty if they are not held."""
        return () if self.weights is None else tuple(shards_of(self.weights))


class Consensus:
    """The weights of one block at the head of its log, and what older versions are rebuilt from."""

    def __init__(
        self, weights: Quanta, codec: UpdateCodec, block: int, light: bool = False
    ) -> None:
        self.weights = weights
        self.codec, self.block, self.light = codec, block, light
        self.steps: dict[bytes, FixedUpdate] = {}  # entry digest -> its step, of the newest
        self.updates: dict[bytes, list[bytes]] = {}  # entry digest -> the encoded updates in it
        self.snapshots: dict[bytes, Snapshot] = {}  # entry digest -> its weights
        self._again: dict[bytes, Quanta] = {}  # recomputed snapshots, by the digest of their index
        self._asked = False  # whether `_again` was needed since the last `prune`

    def copy(self) -> Consensus:
        """An independent copy that shares the arrays."""
        other = Consensus(self.weights, self.codec, self.block, self.light)
        other.steps, other.updates = dict(self.steps), dict(self.updates)
        other.snapshots = dict(self.snapshots)
        other._again, other._asked = dict(self._again), self._asked
        return other

    def whole(self, log: ConsensusLog) -> Consensus:
        """A copy that is not `light`: with its snapshots and newest steps in memory."""
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
        """The last steps, whose sum is the trend: every replica at this head must get the same one.

        So only steps since the older snapshot count, which newcomers have too. Empty before the
        run's first step, or if we lack some of these steps because we started from the newer
        snapshot: our next step may then differ from the others', and we will move to theirs.
        """
        recent = [self.step_of(entry) for entry in log.steps_kept()[-TREND_ROUNDS:]]
        return tuple(step for step in recent if step is not None) if None not in recent else ()

    def step_of(self, entry: Entry) -> FixedUpdate | None:
        """The step of an entry, recomputed from its updates if not held; None if neither is."""
        held = self.steps.get(entry.digest)
        if held is None and entry.digest in self.updates:
            updates = self.updates[entry.digest]
            return replayed_step(entry, updates, self.codec, self.block)
        return held

    def _fill_steps(self, log: ConsensusLog) -> None:
        """Hold exactly the steps that judge the next updates (none if `light`)."""
        newest = () if self.light else log.steps_kept()[-TREND_ROUNDS:]
        found = ((entry.digest, self.step_of(entry)) for entry in newest)
        self.steps = {digest: step for digest, step in found if step is not None}

    def advance(
        self, entry: Entry, new: Quanta, step: FixedUpdate, updates: Sequence[bytes]
    ) -> None:
        """Append a step that is already computed: `new` are the weights after it."""
        self.weights = new
        self.updates[entry.digest] = list(updates)
        if not self.light:
            self.steps[entry.digest] = step
            for old in list(self.steps)[:-TREND_ROUNDS]:
                del self.steps[old]

    def follow(self, entry: Entry, updates: Sequence[bytes]) -> None:
        """Append a step by replaying the updates that went into it."""
        new, step = replay(self.weights, entry, updates, self.codec, self.block)
        self.advance(entry, new, step, updates)

    def roll_back(self, undone: Sequence[Entry]) -> bool:
        """Undo these entries (newest first). False, and nothing changes, if a step is missing."""
        back = self.before(undone)
        if back is None:
            return False
        self.weights = back.astype(np.int32)
        for entry in undone:
            self.steps.pop(entry.digest, None)
            self.updates.pop(entry.digest, None)
        return True

    def before(self, undone: Sequence[Entry]) -> Ints | None:
        """The weights before these entries (newest first), or None if a step is missing."""
        back = self.weights.astype(np.int64)
        for entry in undone:
            step = self.step_of(entry)
            if step is None:
                return None
            add_into(back, step, -1)
        return back

    def restart(self, entry: Entry, weights: Quanta) -> None:
        """Drop everything and start from a snapshot, whose digest is checked."""
        if weights_digest(weights) != entry.weights:
            raise LogError(f"the snapshot of round {entry.round} is not its consensus")
        self.weights = weights
        self.steps.clear()
        self.updates.clear()
        self.snapshots.clear()

    def go_on(self, log: ConsensusLog, start: Entry, data: Mapping[bytes, Sequence[bytes]]) -> None:
        """Replay from `start`, where we are, to the head of `log`, taking its snapshots on the way.

        `data` has the encoded updates of each entry by its digest.
        """
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
        """Take a snapshot if one is due, and drop what is no longer served.

        `index` is the snapshot's index if it is already computed, since that takes a while.
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
        """The weights of a snapshot, recomputed if not held, which may take seconds.

        None if that is not possible. Recomputed weights are kept until a round passes in which no
        peer asked for any.
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
        """The oldest snapshot from which we hold the updates of every entry up to the head."""
        for entry in log.pinned():
            snapshot = self.snapshots.get(entry.digest)
            later = [e for e in log.entries if e.round > entry.round]
            if snapshot is not None and all(e.digest in self.updates for e in later):
                return entry, snapshot
        return None
