"""How far the start of this process is: named moments, for the line of figures it leaves behind.

One list for the process, because its phases run through every layer. Decides nothing.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

_marks: list[tuple[str, float]] = []


def mark(phase: str) -> None:
    """This phase is over. Of a phase that comes again only the first end counts."""
    if all(name != phase for name, _ in _marks):
        _marks.append((phase, since_start_s()))


def durations() -> dict[str, float]:
    """Seconds of every phase, in their order; their sum is the time since the process began."""
    found, before = {}, 0.0
    for name, at_s in _marks:
        found[name] = round(at_s - before, 3)
        before = at_s
    return found


def since_start_s() -> float:
    """Since the kernel started this process, interpreter and imports included."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        began_s = ticks / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    return time.process_time()
