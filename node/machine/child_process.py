"""Let a child process end with its parent, also when that is killed with SIGKILL.

Linux only; elsewhere the child has to notice it by itself.
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


_LIBC = _libc()  # loaded at import: loading is not safe between fork and exec
_PR_SET_PDEATHSIG = 1


def leave_with_parent() -> None:
    """Called in a new child: it gets SIGTERM when the thread that started it ends."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
