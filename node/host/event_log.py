"""The host's event log: one JSON line per round and per thing that happened, append-only.

The source of status, report and benchmarks (docs/events.md). A disk that is full costs lines, not
training: that is said once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

from swarm.events import EventError, LogEvent, from_line, to_line

LATELY_BYTES = 8 << 20  # about a day of rounds of 15 s


class EventLog:
    """Appends to `events.jsonl` in a folder; `listen` hears every event as well."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.path = folder / "events.jsonl"
        self.say = say
        self.listeners: list[Callable[[LogEvent], None]] = []
        self._failed = False

    def write(self, event: LogEvent) -> None:
        for listener in self.listeners:
            listener(event)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One write of one line: a reader never sees half of it, a killed writer or a full disk
            # leaves at most one broken last line.
            with open(self.path, "a+b", buffering=0) as file:
                broken = b"" if _ends_a_line(file) else b"\n"  # or both lines would be lost
                file.write(broken + to_line(event).encode() + b"\n")
            self._failed = False
        except OSError as error:
            if not self._failed:
                self.say(f"cannot write {self.path.name}: {error.strerror}; training goes on")
            self._failed = True

    def lately(self) -> Iterator[LogEvent]:
        """What the end of the log tells of earlier processes. What cannot be read is left out."""
        try:
            with open(self.path, "rb") as file:
                start = max(0, os.fstat(file.fileno()).st_size - LATELY_BYTES)
                file.seek(start)
                lines = file.read(LATELY_BYTES).split(b"\n")
        except OSError:
            return
        for line in lines[1 if start else 0 :]:
            try:
                yield from_line(line.decode())
            except (EventError, UnicodeDecodeError, OverflowError):
                continue


def _ends_a_line(file: FileIO) -> bool:
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
