"""How much memory there is, and how this process gives it back: not after every array.

Decides one thing, for the C library's allocator. A round makes and drops hundreds of arrays of some
megabytes, and so does a training step; glibc returns such a one to the system at once and gets it
back page by page, each page zeroed anew, which was up to half of the time of decoding an update and
a tenth of a step's. Arrays above 32 MB are returned as before. Does not know what the arrays are.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

KEPT_BYTES = 256 << 20  # of free memory at the heap's end, before some of it is returned
LARGE_BYTES = 32 << 20  # what is mapped, and returned, by itself: the most that glibc allows
# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> bool:
    """Once, at the start of a process. Whether the allocator is one that could be told."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    # One heap for all threads: what one thread frees serves the next, and they share Python's lock.
    wanted = (
        (_M_TRIM_THRESHOLD, KEPT_BYTES),
        (_M_MMAP_THRESHOLD, LARGE_BYTES),
        (_M_ARENA_MAX, 1),
    )
    return all(mallopt(option, value) == 1 for option, value in wanted)


def available_memory_bytes() -> int | None:
    """What the system could give to new processes now; None where it does not say."""
    with suppress(OSError, ValueError, StopIteration, IndexError):
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
