"""The key/value caches that a host keeps for its clients' texts between sweeps.

They are bounded in number and age; the least recently used goes first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from node.serving.compute import Session
from swarm.run import Run
from swarm.writing.sweep import Cache

SESSIONS_MAX = 64
SESSIONS_MAX_BYTES = 1 << 30  # keys and values of all sessions with full contexts
IDLE_S = 60.0
HOLD_S = 2.0  # a session used within this time is not evicted for a new one

Key = tuple[bytes, bytes, bytes]  # the client, its session, the version


class Sessions:
    """Sessions by key, the most recently used at the end."""

    def __init__(self, run: Run, idle_s: float = IDLE_S) -> None:
        self.idle_s = idle_s
        self._most = max(2, min(SESSIONS_MAX, SESSIONS_MAX_BYTES // session_bytes(run)))
        self._kept: OrderedDict[Key, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def full(self) -> bool:
        """Whether a new session would evict one that is in use."""
        if len(self._kept) < self._most:
            return False
        return next(iter(self._kept.values())).used_s > time.monotonic() - HOLD_S

    def find(self, key: Key, start: int) -> Session | None:
        """The session, if its caches reach to `start`."""
        session = self._kept.get(key)
        return session if session is not None and session.length >= start else None

    def open(self, key: Key, start: int, new_cache: Callable[[], Cache]) -> Session | None:
        """The session to go on with, or a new one if `start` is 0; None if it is gone."""
        session = self.find(key, start)
        if session is None:
            if start:
                return None
            session = Session(new_cache())
        session.used_s = time.monotonic()
        self._kept[key] = session
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return session

    def forget_idle(self) -> None:
        """Drop the sessions that were not used for `idle_s`."""
        oldest_s = time.monotonic() - self.idle_s
        for key in [k for k, session in self._kept.items() if session.used_s < oldest_s]:
            del self._kept[key]

    def clear(self) -> None:
        self._kept.clear()


def session_bytes(run: Run) -> int:
    """Size of the keys and values of one full context in one block."""
    shape = run.model
    return 2 * 4 * shape.layers * shape.width * shape.context
