"""The time of day from a clock that does not follow steps of the wall clock.

Read once from the wall clock, then continued with the time since boot (which counts a machine's
sleep too). When NTP or a person steps the wall clock, rounds and records are not disturbed. Whether
to follow a step after all is `node.network.peer_clock`'s decision, which can ask peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # only Linux has the former


def since_boot_s() -> float:
    return time.clock_gettime(_CLOCK)


class SteadyTime:
    """A clock; calling it returns the seconds since 1970."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = since_boot_s,
    ) -> None:
        self._wall, self.steady = wall, steady
        self._base_s = wall() - steady()

    def __call__(self) -> float:
        return self._base_s + self.steady()

    @property
    def stepped_s(self) -> float:
        """How far the wall clock is ahead of this one, because it was stepped."""
        return self._wall() - self()

    def follow(self) -> float:
        """Set this clock to the wall clock; return by how much it changed."""
        step_s = self.stepped_s
        self._base_s += step_s
        return step_s

    def give_up(self, step_s: float) -> None:
        """Undo a step that was followed; the wall clock is not touched."""
        self._base_s -= step_s
