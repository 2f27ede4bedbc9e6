"""How much memory is available, and allocator settings that keep freed memory for reuse.

A round makes and drops hundreds of arrays of some megabytes, and so does a training step. By
default glibc returns each to the system at once and gets it back page by page, zeroed anew: up to
half of the time of decoding an update, and a tenth of a training step's. Arrays above 32 MB are
still returned at once.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

KEPT_BYTES = 256 << 20  # free memory kept at the heap's end before some of it is returned
LARGE_BYTES = 32 << 20  # above this an array is mapped and returned alone; glibc allows no more
# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> bool:
    """Set the allocator, once at the start of a process. False if it is not glibc's."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    # One heap for all threads, so that they reuse each other's memory; Python's lock keeps them
    # from competing for it.
    wanted = (
        (_M_TRIM_THRESHOLD, KEPT_BYTES),
        (_M_MMAP_THRESHOLD, LARGE_BYTES),
        (_M_ARENA_MAX, 1),
    )
    return all(mallopt(option, value) == 1 for option, value in wanted)


def available_memory_bytes() -> int | None:
    """Memory available to new processes now; None if the system does not tell."""
    with suppress(OSError, ValueError, StopIteration, IndexError):
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
