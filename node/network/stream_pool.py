"""Streams kept open between two questions to a peer, so that the next one need not open its own.

Opening a stream costs p2pd and both hosts about six times the CPU of asking on one that is open
(3.0 against 0.5 ms on loopback), and over a real link a round trip; a round asks every replica
three times within a second, and the next round often comes within half a minute. Decides how many
are kept and for how long: while they rest, the other side keeps no place for them. Knows nothing of
what is asked.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from node.network.p2pd_stream import P2pdStream
from protocol.limits import EXCHANGES_PER_STREAM, RESTS_S

IDLE_S = RESTS_S / 2  # before the other side would give it up
IDLE_PER_PEER = 2
IDLE_IN_ALL = 32


@dataclass(frozen=True, eq=False)
class Kept:
    """A stream with nothing under way on it, and how many questions it has carried."""

    stream: P2pdStream
    exchanges: int
    since_s: float = field(default_factory=time.monotonic)


class StreamPool:
    """Idle streams by peer, the latest last. All calls are from the loop's thread."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._idle: dict[bytes, dict[Kept, asyncio.TimerHandle]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def take(self, peer_id: bytes) -> Kept | None:
        """A stream to this peer that is still good, or None."""
        idle = self._idle.get(peer_id, {})
        while idle:
            kept, timer = idle.popitem()
            timer.cancel()
            if not idle:
                del self._idle[peer_id]
            # A host that was asleep finds its timers late, and streams that the others gave up.
            if kept.stream.quiet and time.monotonic() - kept.since_s <= self._idle_s:
                return kept
            kept.stream.abort()
        return None

    def give(self, peer_id: bytes, kept: Kept) -> bool:
        """Keep a stream for the next question; False if it is not worth keeping: close it."""
        idle = self._idle.get(peer_id, {})
        full = len(idle) >= IDLE_PER_PEER or len(self) >= IDLE_IN_ALL
        if full or kept.exchanges >= EXCHANGES_PER_STREAM or not kept.stream.quiet:
            return False
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._idle_s, self._expire, peer_id, kept)
        self._idle.setdefault(peer_id, {})[kept] = timer
        return True

    def _expire(self, peer_id: bytes, kept: Kept) -> None:
        idle = self._idle[peer_id]
        del idle[kept]
        if not idle:
            del self._idle[peer_id]
        task = asyncio.get_running_loop().create_task(kept.stream.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def clear(self) -> None:
        """Drop all of them: p2pd is going, or gone."""
        for idle in self._idle.values():
            for kept, timer in idle.items():
                timer.cancel()
                kept.stream.abort()
        self._idle.clear()
