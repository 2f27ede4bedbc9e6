"""The event log: whole lines, listeners first, and a disk that cannot be written to."""

from __future__ import annotations

from pathlib import Path

from node.event_log import EventLog
from swarm.events import LogEvent, NodeEvent, from_line


def event(what: str) -> NodeEvent:
    return NodeEvent(1.0, "me", what)


def test_lines_are_appended_and_can_be_read_back(tmp_path: Path) -> None:
    said: list[str] = []
    heard: list[LogEvent] = []
    log = EventLog(tmp_path / "new" / "folder", said.append)
    log.listeners.append(heard.append)
    for what in ("started", "left"):
        log.write(event(what))
    lines = (tmp_path / "new" / "folder" / "events.jsonl").read_text().splitlines()
    assert [from_line(line) for line in lines] == heard == [event("started"), event("left")]
    assert said == []


def test_what_cannot_be_written_is_said_once_and_heard_all_the_same(tmp_path: Path) -> None:
    said: list[str] = []
    heard: list[LogEvent] = []
    (tmp_path / "file").write_text("in the way")
    log = EventLog(tmp_path / "file", said.append)
    log.listeners.append(heard.append)
    for _ in range(3):
        log.write(event("round"))
    assert len(heard) == 3 and len(said) == 1 and "training goes on" in said[0]
    (tmp_path / "file").unlink()
    log.write(event("round"))
    (tmp_path / "file" / "events.jsonl").unlink()
    (tmp_path / "file").rmdir()
    (tmp_path / "file").write_text("again")
    log.write(event("round"))
    assert len(said) == 2  # it had been over in between
