"""Looks at other processes, for tests that run in no event loop: whether one lives, and waiting."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    """A zombie is not: it only waits for its parent to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def comes_true(condition: Callable[[], object], limit_s: float) -> bool:
    """Whether it does within this time; returns as soon as it does."""
    end_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)  # between two looks
    return bool(condition())


def ends(pid: int, limit_s: float) -> bool:
    """Whether it does within this time; returns in the very moment in which it does."""
    process = os.pidfd_open(pid)
    try:
        return bool(select.select([process], [], [], limit_s)[0])
    finally:
        os.close(process)
