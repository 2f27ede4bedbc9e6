"""Our own updates that the running weights contain, and which of them are in flight.

The ledger of `swarm.consensus.feedback` (weights = consensus + unsent) holds on a live host only if
an update is taken out of the weights exactly when it was in them. So this is the one list of those
that are: an update that the consensus includes is settled if it stands here, and is none of our
business if it does not (made before a crash, from weights that are gone). Decides how long one
stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.votes import UpdateRef
from swarm.consensus.fixed_point import FixedUpdate
from swarm.consensus.forks import REBASE_DEPTH
from swarm.consensus.log import ConsensusLog

KEPT_ROUNDS = 16  # a bound where no round is decided for long
KEPT_ENTRIES = 2 * REBASE_DEPTH  # an update may be settled, and then its entry rolled back


@dataclass(frozen=True)
class OwnUpdate:
    round: int
    update: FixedUpdate
    payload: bytes


class OwnUpdates:
    def __init__(self) -> None:
        self._made: dict[UpdateRef, OwnUpdate] = {}
        self._returned: set[UpdateRef] = set()

    def add(self, ref: UpdateRef, made: OwnUpdate) -> None:
        self._made[ref] = made

    def get(self, ref: UpdateRef) -> OwnUpdate | None:
        return self._made.get(ref)

    def returned(self, ref: UpdateRef) -> None:
        """It is unsent again: a later update may contain it."""
        if ref in self._made:
            self._returned.add(ref)

    def in_flight(self, log: ConsensusLog) -> dict[UpdateRef, OwnUpdate]:
        """Those whose fate `log` does not tell yet. Also of a log that is older than today's."""
        return {
            ref: made
            for ref, made in self._made.items()
            if made.round > log.head.round and ref not in self._returned
        }

    def keep_only(self, log: ConsensusLog) -> None:
        """The weights were set to the consensus and what is in flight: nothing else is in them."""
        self._made = self.in_flight(log)
        self._returned.clear()

    def restore(self, made: Mapping[UpdateRef, OwnUpdate]) -> None:
        self._made, self._returned = dict(made), set()

    def prune(self, log: ConsensusLog, in_flight: Mapping[UpdateRef, int]) -> None:
        """Forget what can be neither settled nor returned any more."""
        oldest = log.entries[-KEPT_ENTRIES:][0].round
        newest = max((made.round for made in self._made.values()), default=0)
        self._made = {
            ref: made
            for ref, made in self._made.items()
            if ref in in_flight or made.round >= max(oldest, newest - KEPT_ROUNDS)
        }
        self._returned &= self._made.keys()
