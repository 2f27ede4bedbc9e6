"""The event log: whole lines, listeners first, and a disk that cannot be written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.host import event_log
from node.host.event_log import EventLog
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


def test_the_end_of_the_log_tells_of_earlier_processes(tmp_path: Path) -> None:
    log = EventLog(tmp_path, lambda text: None)
    assert list(log.lately()) == []  # no file yet
    for what in ("started", "left"):
        log.write(event(what))
    with open(log.path, "ab") as file:
        file.write(b"\xff not a line\n{}\n")
    log.write(event("resumed"))
    assert list(log.lately()) == [event("started"), event("left"), event("resumed")]


def test_of_a_long_log_only_the_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path, lambda text: None)
    for number in range(50):
        log.write(event(f"left {number}"))
    monkeypatch.setattr(event_log, "LATELY_BYTES", 500)
    found = list(log.lately())
    assert found[-1] == event("left 49") and 2 <= len(found) < 20


def test_a_half_written_line_costs_only_itself(tmp_path: Path) -> None:
    """A killed writer or a full disk left it: what is written next must not be glued to it."""
    log = EventLog(tmp_path, lambda text: None)
    log.write(event("started"))
    with open(log.path, "ab") as file:
        file.write(b'{"half": ')
    for what in ("resumed", "left"):
        log.write(event(what))
    assert list(log.lately()) == [event("started"), event("resumed"), event("left")]
    assert log.path.read_bytes().count(b"\n") == 4
