"""How much at once, and when to come back: places for transfers, and the patience of a requester.

Decides whom a responder turns away (`busy`), what it tells them, and how long a requester waits
before it asks again. Knows no streams and no messages; time and randomness are passed in.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from protocol.errors import WireError
from protocol.frames import Busy, Deadline, Stalled, Truncated
from protocol.limits import BUSY_RETRY_MAX_S, CONCURRENT_TRANSFERS, STREAMS_PER_PEER

T = TypeVar("T")


class Unreachable(WireError):
    """The peer cannot be dialled: no address answers, or nothing is served there."""


class DaemonGone(WireError):
    """Our own p2pd does not answer. It is being restarted (`network.py`)."""

    def __init__(self) -> None:
        super().__init__("our own p2pd does not answer", "it is restarted; try again")


# What may be otherwise in a moment. Everything else a peer did wrong it would do again.
RETRYABLE = (Busy, Stalled, Truncated, Unreachable, DaemonGone)
_FIRST_GUESS_S = 1.0  # how long a transfer takes, before one was seen
_RETRY_MIN_S = 0.2
_MEMORY = 0.2  # weight of the newest transfer in the average


class Place:
    """One place in a gate. Whoever has it longer than is fair loses it when somebody else asks."""

    def __init__(self, peer_id: bytes, clock: Callable[[], float]) -> None:
        self.peer_id = peer_id
        self.fair_until_s = math.inf
        self.give_up: Callable[[], None] = lambda: None
        self._clock = clock

    def fair_for(self, seconds: float, give_up: Callable[[], None]) -> None:
        """From now on. `give_up` is called once, if the place is taken away."""
        self.fair_until_s, self.give_up = self._clock() + seconds, give_up


class Gate:
    """Places for transfers: a number in all, and fewer for one peer.

    `enter` never waits: a queue of strangers would be memory that they control, and a peer that
    is told `busy` can ask another replica instead. A slow peer is left alone while there is room:
    it may be our line that is slow.
    """

    def __init__(
        self,
        places: int = CONCURRENT_TRANSFERS,
        per_peer: int = STREAMS_PER_PEER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = places
        self._per_peer = per_peer
        self._clock = clock
        self._inside: Counter[bytes] = Counter()
        self._held: list[Place] = []
        self._usual_s = _FIRST_GUESS_S
        self._turned_away = 0  # since a place was last given: they will all come back

    @property
    def inside(self) -> int:
        return self._inside.total()

    @contextmanager
    def enter(self, peer_id: bytes) -> Iterator[Place]:
        """A place while the context lasts. Raises `Busy` with when there may be one."""
        if self._inside[peer_id] >= self._per_peer or not self._has_room():
            self._turned_away += 1
            if not self._inside[peer_id]:
                del self._inside[peer_id]  # looking up must not remember every stranger
            raise Busy(self.retry_after_s())
        place = Place(peer_id, self._clock)
        self._inside[peer_id] += 1
        self._held.append(place)
        self._turned_away = max(0, self._turned_away - 1)
        began_s = self._clock()
        try:
            yield place
        finally:
            self._usual_s += _MEMORY * (self._clock() - began_s - self._usual_s)
            if place in self._held:
                self._leave(place)

    def _has_room(self) -> bool:
        """Perhaps because the one who is the furthest beyond its time loses its place."""
        if self.inside < self._places:
            return True
        longest = min(self._held, key=lambda place: place.fair_until_s)
        if longest.fair_until_s > self._clock():
            return False
        self._leave(longest)
        longest.give_up()
        return True

    def _leave(self, place: Place) -> None:
        self._held.remove(place)
        self._inside[place.peer_id] -= 1
        if not self._inside[place.peer_id]:
            del self._inside[place.peer_id]

    def retry_after_s(self) -> float:
        """About when those who were turned away before have been served."""
        turns = 1 + self._turned_away / self._places
        return min(max(self._usual_s * turns, _RETRY_MIN_S), BUSY_RETRY_MAX_S)


@dataclass(frozen=True)
class Backoff:
    """Waits that double from `first_s` to `most_s`, each cut to a random part of itself.

    The random part keeps peers that were cut off together from coming back together.
    """

    first_s: float = 0.5
    most_s: float = 60.0

    def wait_s(self, attempt: int, rng: random.Random) -> float:
        """Before attempt number `attempt` + 1; the first one was 0."""
        ceiling_s = min(self.first_s * 2.0 ** min(attempt, 32), self.most_s)
        return ceiling_s * rng.uniform(0.5, 1.0)

    def after(self, error: WireError, attempt: int, rng: random.Random) -> float:
        """The wait after an error. A peer that said when gets exactly that, plus a share."""
        if isinstance(error, Busy):
            return error.retry_after_s * rng.uniform(1.0, 1.5)
        return self.wait_s(attempt, rng)


async def with_backoff(
    call: Callable[[], Awaitable[T]],
    deadline: Deadline,
    rng: random.Random,
    backoff: Backoff | None = None,
) -> T:
    """Call until it succeeds, its error is final, or the next wait would pass the deadline."""
    backoff = backoff or Backoff()
    attempt = 0
    while True:
        try:
            return await call()
        except RETRYABLE as error:
            wait_s = backoff.after(error, attempt, rng)
            if deadline.clock() + wait_s >= deadline.at_s:
                raise
        attempt += 1
        await asyncio.sleep(wait_s)


class SaidOnce:
    """Tells a person about a condition when it begins and when it ends, not every time it holds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._current: str | None = None

    def trouble(self, line: str) -> None:
        if self._current != line:
            self._current = line
            self._say(line)

    def over(self, line: str) -> None:
        if self._current is not None:
            self._current = None
            self._say(line)
