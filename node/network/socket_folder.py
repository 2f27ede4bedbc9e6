"""The private folder in which a node and its p2pd meet: two sockets, removed with the daemon.

After kill -9 nobody removes it. The next daemon that starts on the machine tidies up what such
ends left behind, but never what somebody listens to, nor what is not ours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

PREFIX = "blockswarm-"
CONTROL, INCOMING = "control", "incoming"
STALE_S = 60.0  # a daemon that starts right now has its folder before its sockets
MOST_SWEPT = 100  # at once: a start must not wait for a full folder
_PATH_MAX = 90  # the kernel's limit is 104 to 108 bytes, with the file's name


def make_socket_folder() -> Path:
    """A new folder that only we can enter."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
    if len(str(folder)) > _PATH_MAX:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    sweep(folder.parent)
    return folder


def sweep(parent: Path) -> int:
    """Remove the folders of daemons that are gone; how many."""
    swept = 0
    with contextlib.suppress(OSError):
        for folder in list(parent.glob(f"{PREFIX}*"))[:MOST_SWEPT]:
            if _is_left_behind(folder):
                shutil.rmtree(folder, ignore_errors=True)
                swept += 1
    return swept


def _is_left_behind(folder: Path) -> bool:
    try:
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
            return False
        if time.time() - facts.st_mtime < STALE_S:
            return False
        inside = list(folder.iterdir())
        return all(
            path.name in (CONTROL, INCOMING) and path.is_socket() and not _answers(path)
            for path in inside
        )
    except OSError:
        return False


def _answers(path: Path) -> bool:
    """Whether a process listens there. In doubt it does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
