"""The canary, live: the consensus measured on held-out text, and senders tested now and then.

Decides when to measure and what is handed to `swarm.consensus.trust.Canary`, which decides what it
means. The verdict is an event of the round like any other; whom it excludes is left out by our
votes. All of it together takes at most a fixed share of the training process's time: after a
measurement, or after up to 18 of them in an alarm or an audit, the canary rests so many times as
long.

It judges only where all hosts are known to have the same text (`data.sha256` in the run file): what
a host learns from code makes another's prose worse for a while, and is no harm. Elsewhere it
measures, and blames nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import numpy as np

from node.log.consensus import Consensus
from node.replica.replica import Replica
from protocol.identity import peer_from_text
from protocol.log import Entry
from swarm.consensus.fixed_point import QUANTUM_BITS, Ints, add_into, scaled, to_float
from swarm.consensus.log import ConsensusLog
from swarm.consensus.trust import Canary
from swarm.learning.flat import Floats
from swarm.rounds import actions as act
from swarm.rounds.state import MAX_GROUP

_log = logging.getLogger(__name__)

TIME_SHARE = 25  # at most one part in so many of the time goes into measuring

Evaluate = Callable[[Floats], Awaitable[float]]
# Which of the heads that we can still make; (loss then, loss with each sender's part, ourselves).
Chosen = Callable[[Collection[bytes]], bytes | None]
Blamed = Callable[[float, Mapping[str, float], str], list[str]]


class CanaryWatch:
    """Watches one replica. `evaluate` is the trainer's: CE of weights on held-out text. Without
    `judges` it only measures."""

    def __init__(
        self,
        replica: Replica,
        evaluate: Evaluate,
        canary: Canary | None = None,
        time_share: float = TIME_SHARE,
        judges: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica, self.evaluate, self.clock = replica, evaluate, clock
        self.canary = canary or Canary()
        self.time_share, self.judges = time_share, judges
        self._rests_until_s = -1.0
        self._busy = False

    async def look(self) -> float | None:
        """The CE of the consensus now, or None if it is not time. Raises `TrainerError`."""
        began_s = self.clock()
        if self._busy or began_s < self._rests_until_s:
            return None
        self._busy = True
        try:
            return await self._measure()
        finally:
            self._busy = False
            spent_s = self.clock() - began_s
            self._rests_until_s = began_s + self.time_share * spent_s

    async def _measure(self) -> float:
        log, consensus = self.replica.state.log, self.replica.consensus.copy()
        head = log.head.digest
        loss_nats = await self.evaluate(to_float(consensus.weights))
        if not self.judges:
            return loss_nats
        self.canary, alarm = self.canary.with_loss(head, loss_nats)
        harmful: list[str] = []
        if alarm:
            harmful = await self._tested(log, consensus, self.canary.best, self.canary.harmful)
            _log.info("CE of the consensus jumped to %.3f: %s", loss_nats, harmful or "nobody")
            self.canary = self.canary.accepting(head, loss_nats)
        elif self.canary.audit_due:
            harmful = await self._tested(log, consensus, self.canary.oldest, self.canary.undoing)
            self.canary = self.canary.audited()
        if harmful:
            number = self.replica.state.round
            self.replica.hear(act.CanaryVerdict(number, tuple(harmful)))
        return loss_nats

    async def _tested(
        self, log: ConsensusLog, consensus: Consensus, chosen: Chosen, blamed: Blamed
    ) -> list[str]:
        """Who is to blame: each sender's part alone, on top of an earlier consensus."""
        after: list[Entry] = []  # newest first
        reachable = {log.head.digest: tuple(after)}
        for entry in reversed(log.entries):
            if entry.digest not in consensus.updates:
                break
            after.append(entry)
            reachable[entry.parent] = tuple(after)
        head = chosen(reachable)
        if head is None:
            return []
        undone = reachable[head]
        base = await asyncio.to_thread(consensus.before, undone)
        if base is None:
            return []
        # Measured again: the copies of other blocks that ours reads have changed since then.
        before_nats = await self.evaluate((base * 2.0**-QUANTUM_BITS).astype(np.float32))
        if not self.canary.still_holds(head, before_nats):
            _log.info("the blocks that this one reads got worse: nobody here is to blame")
            return []
        losses: dict[str, float] = {}
        for sender in self._suspects(undone):
            flat = await asyncio.to_thread(_with_part, base, undone, consensus, sender)
            losses[sender] = await self.evaluate(flat)
        return blamed(before_nats, losses, self.replica.me)

    def _suspects(self, entries: Sequence[Entry]) -> list[str]:
        """Ourselves first, then those who contributed most; at most a group."""
        parts = Counter(c.sender for e in entries for c in e.contributions if c.scale > 0)
        ranked = sorted(parts, key=lambda s: (s != self.replica.me, -parts[s], s))
        return ranked[:MAX_GROUP]


def _with_part(base: Ints, entries: Sequence[Entry], consensus: Consensus, sender: str) -> Floats:
    """The weights `base` with all that one sender added in these entries."""
    total, peer = base.copy(), peer_from_text(sender)
    for entry in entries:
        included = [c for c in entry.contributions if c.scale > 0]
        for part, payload in zip(included, consensus.updates[entry.digest], strict=True):
            if part.sender == sender:
                update = consensus.codec.decode(payload, consensus.block, entry.round, peer)
                add_into(total, scaled(update, part.scale))
    return (total * 2.0**-QUANTUM_BITS).astype(np.float32)
