"""A child that leaves with its parent, however that went: by kill -9, too.

Knows nothing of what the child does. Only Linux can; elsewhere children notice by their own means.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from typing import Any


def _libc() -> Any:
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        return libc if libc.prctl else None
    return None


_LIBC = _libc()  # loaded here: between fork and exec nothing may be
_PR_SET_PDEATHSIG = 1


def leave_with_parent() -> None:
    """In a child, at its start: SIGTERM when the thread that started it is gone."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
