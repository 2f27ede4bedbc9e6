"""Read event logs within limits; damaged lines are left out and noted.

A log can be damaged by a killed writer, and contains text that peers chose.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import BinaryIO

from protocol.errors import DataError
from swarm.events import (
    MAX_LINE_BYTES,
    SCHEMA_VERSION,
    EventError,
    LogEvent,
    from_line,
)

MAX_LINES = 200_000  # of all logs of a report together: 100 hosts for 2000 rounds
MAX_BYTES = 128 * 2**20  # likewise; as Python objects they take several times as much


class ReportError(DataError):
    """No report can be made from these event logs."""


@dataclass
class Budget:
    """What remains of the limits on reading."""

    lines: int = MAX_LINES
    size_bytes: int = MAX_BYTES


@dataclass(frozen=True)
class Log:
    """The events of one file; `notes` say what was left out."""

    source: str
    events: tuple[LogEvent, ...]
    notes: tuple[str, ...] = ()


def read_log(file: BinaryIO, source: str, budget: Budget) -> Log:
    """Read a log within the budget. A line of another schema version refuses the whole log."""
    events: list[LogEvent] = []
    broken: list[int] = []
    notes: list[str] = []
    number, whole = 0, True
    while line := file.readline(MAX_LINE_BYTES + 2):
        whole = line.endswith(b"\n")
        budget.lines -= 1
        budget.size_bytes -= len(line)
        if budget.lines < 0 or budget.size_bytes < 0:
            notes.append(
                f"{source}: cut after {number} lines: a report reads {MAX_LINES} lines and "
                f"{MAX_BYTES // 2**20} MiB at most"
            )
            whole = True
            break
        number += 1
        if not line.strip():
            continue
        event = _event(line, f"{source}, line {number}")
        if event is None:
            broken.append(number)
        else:
            events.append(event)
    if broken and not whole and broken[-1] == number:
        broken.pop()
        notes.append(f"{source}: the last line is cut off, as by a killed writer; left out")
    if broken:
        notes.append(f"{source}: left out {len(broken)} damaged lines, the first is {broken[0]}")
    return Log(source, tuple(events), tuple(notes))


def _event(line: bytes, where: str) -> LogEvent | None:
    try:
        text = line.decode()
        return from_line(text)
    except (EventError, UnicodeDecodeError, OverflowError):
        version = _version(line)
        if version is not None and version != SCHEMA_VERSION:
            raise ReportError(
                f"{where}: event log of schema version {version}, not {SCHEMA_VERSION}",
                "make the report with the blockswarm that wrote the log, or a newer one",
            ) from None
        return None


def _version(line: bytes) -> int | None:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    version = data.get("v") if isinstance(data, dict) else None
    return version if type(version) is int and abs(version) < 2**53 else None
