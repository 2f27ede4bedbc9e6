"""Small files that a node writes again from time to time: peers, ledger, budget.

What they say is taken on the event loop, where it cannot change meanwhile; writing and waiting for
the disk is a thread's work, since a busy disk would hold the loop for a second. Knows nothing of
what is in them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from node.machine.atomic import write_atomically

Contents = Callable[[], bytes | None]  # None: there is nothing to keep


class KeptFiles:
    """Files of one folder, by name. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._contents: dict[str, Contents] = {}
        self._writing = threading.Lock()  # a thread whose task was cancelled may still be at it

    def keep(self, name: str, contents: Contents) -> None:
        self._contents[name] = contents

    async def save(self) -> None:
        """Raises `StorageError`."""
        await asyncio.to_thread(self._write, self._now())

    def save_now(self) -> None:
        """The same, without the loop: before a process ends."""
        self._write(self._now())

    def _now(self) -> dict[str, bytes]:
        if self.folder is None:
            return {}
        made = {name: contents() for name, contents in self._contents.items()}
        return {name: data for name, data in made.items() if data is not None}

    def _write(self, files: Mapping[str, bytes]) -> None:
        with self._writing:
            for name, data in files.items():
                assert self.folder is not None
                write_atomically(self.folder / name, partial(_fill, data))


def _fill(data: bytes, path: Path) -> None:
    path.write_bytes(data)
