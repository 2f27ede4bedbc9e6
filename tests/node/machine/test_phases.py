"""How far a start is: phases in their order, and their sum."""

from __future__ import annotations

import pytest

from node.machine import phases


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1.0, 1.5, 4.0))
    monkeypatch.setattr(phases, "_marks", [])
    monkeypatch.setattr(phases, "since_start_s", lambda: next(times))
    for name in ("python", "libraries", "libraries", "run_file"):
        phases.mark(name)  # the second end of a phase does not count
    assert phases.durations() == {"python": 1.0, "libraries": 0.5, "run_file": 2.5}


def test_time_runs() -> None:
    first = phases.since_start_s()
    assert 0 <= first <= phases.since_start_s()
