"""Timings of the phases of this process's start, for the figures that it prints.

One global list, because the phases run through every layer.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

_marks: list[tuple[str, float]] = []


def mark(phase: str) -> None:
    """Record that a phase is over. If it is repeated only its first end counts."""
    if all(name != phase for name, _ in _marks):
        _marks.append((phase, since_start_s()))


def durations() -> dict[str, float]:
    """Seconds of each phase, in order; their sum is the time from process start to last mark."""
    found, before = {}, 0.0
    for name, at_s in _marks:
        found[name] = round(at_s - before, 3)
        before = at_s
    return found


def since_start_s() -> float:
    """Seconds since the kernel started this process, so including interpreter and imports."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        began_s = ticks / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    return time.process_time()
