"""How well this node knows a peer: by hearsay, because it spoke to us, or by its accepted work.

Identities are free, and so are records, and the records of others that an answer may carry; a
connection costs a little; updates that went into our block's log cost work. Decides the one order
in which peers are preferred wherever not all of them can be: whom a board keeps and shows itself
to, whose address stays in the book, whose clock and whose view of us count, whose records a lookup
returns. Knows no addresses and no records.

Known limit: who speaks to us under many identities stands as well as an honest newcomer. It never
stands before a contributor.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping

from protocol.identity import peer_from_text
from swarm.consensus.log import ConsensusLog

SPOKE_KEPT = 1024

LogOf = Callable[[int], ConsensusLog | None]


class Standing(enum.IntEnum):
    """The larger, the better."""

    HEARSAY = 0  # somebody told us of it
    SPOKE = 1  # it came to us itself or answered us: the connection proves who it is
    CONTRIBUTOR = 2  # it may vote in our block: its updates were included for some rounds


class Standings:
    """Of every peer of one run. Bounded: of peers that are not kept all is hearsay."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spoke: dict[bytes, float] = {}  # when, the latest last
        self._block = -1
        self._log_of: LogOf = _no_log
        self._voters: tuple[ConsensusLog | None, frozenset[bytes]] = None, frozenset()

    def works_on(self, block: int, log_of: LogOf) -> None:
        """From now on this host works on a block; `log_of` has the logs that it holds.

        Only our own block's log makes contributors: that of a copy is what its donors said.
        """
        self._block, self._log_of = block, log_of

    def spoke(self, peer_id: bytes) -> None:
        self._spoke.pop(peer_id, None)
        self._spoke[peer_id] = self._clock()
        if len(self._spoke) > SPOKE_KEPT:
            del self._spoke[next(iter(self._spoke))]

    def of(self, peer_id: bytes) -> Standing:
        if peer_id in self._contributors():
            return Standing.CONTRIBUTOR
        return Standing.SPOKE if peer_id in self._spoke else Standing.HEARSAY

    def rank(self, peer_id: bytes) -> tuple[Standing, float]:
        """To sort by, the best last: among equals who spoke to us last is best, by *our* clock."""
        return self.of(peer_id), self._spoke.get(peer_id, 0.0)

    def seen_rounds(self, block: int) -> Mapping[bytes, int]:
        """In how many of the last rounds peers contributed to a block, as far as we have its log.

        What `protocol.admission` prefers. Of a block that we only follow it is no more than the
        log that we believed; so it orders that block's records and nothing else.
        """
        log = self._log_of(block)
        return {} if log is None else _by_peer_id(log.inclusions())

    def _contributors(self) -> frozenset[bytes]:
        log = self._log_of(self._block)
        if log is None:
            return frozenset()
        if log is not self._voters[0]:  # a log never changes; there is another one after a step
            self._voters = log, frozenset(_by_peer_id(dict.fromkeys(log.eligible_voters(), 1)))
        return self._voters[1]


def voters_first(peers: Iterable[str], log: ConsensusLog) -> list[str]:
    """Those that may vote by a log before the others; else in the order given."""
    voters = log.eligible_voters()
    return sorted(peers, key=lambda peer: peer not in voters)


def _no_log(block: int) -> ConsensusLog | None:
    return None


def _by_peer_id(counts: Mapping[str, int]) -> dict[bytes, int]:
    return {peer_from_text(text): count for text, count in counts.items()}
