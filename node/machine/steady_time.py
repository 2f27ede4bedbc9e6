"""This machine's time of day, from a clock that is never set.

Read once from the wall clock; from then on it goes on with the time since boot (which counts a
suspended machine's sleep too). When NTP or a person steps the wall clock, rounds, records and what
peers are told stay where they were. Decides nothing about when a step is to be followed after all:
that is `node.network.peer_clock`'s, which can ask others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # only Linux has the former


def since_boot_s() -> float:
    return time.clock_gettime(_CLOCK)


class SteadyTime:
    """Call it for the seconds since 1970."""

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
        """By how much the wall clock was set since it was last followed."""
        return self._wall() - self()

    def follow(self) -> float:
        """Take the wall clock's time again; by how much this one changed."""
        step_s = self.stepped_s
        self._base_s += step_s
        return step_s

    def give_up(self, step_s: float) -> None:
        """Undo a step that was followed; the wall clock stays as it was set."""
        self._base_s -= step_s
