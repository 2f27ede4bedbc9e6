"""What event logs of a swarm on the bed say: who took part, how long rounds took, CE, bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.wan import events as log
from tests.support.round_events import round_event


def test_a_half_written_line_is_left_for_later(tmp_path: Path) -> None:
    assert log.read(tmp_path) == []
    (tmp_path / "events.jsonl").write_text('{"kind":"node","what":"started"}\n{"kind":')
    assert log.read(tmp_path) == [{"kind": "node", "what": "started"}]
    assert log.said(log.read(tmp_path), "started")
    assert not log.said(log.read(tmp_path), "left")


def test_who_took_part() -> None:
    late = [round_event(n, included=n > 4) for n in range(3, 8)]
    logs = {
        "a": [round_event(n) for n in range(8)],
        "b": [round_event(0, included=None, update_bytes=0), *late],
    }
    assert log.common_first(logs) == 5
    assert log.included_share(logs, 3) == pytest.approx(8 / 10)
    assert log.included_share({}) == 0.0


def test_an_undecided_round_makes_the_others_longer() -> None:
    even = {"a": [round_event(n) for n in range(10)]}
    assert log.seconds_per_decision(even, 0) == pytest.approx(5)
    odd = {"a": [round_event(n, outcome="empty" if n == 4 else "decided") for n in range(10)]}
    assert log.seconds_per_decision(odd, 0) == pytest.approx(50 / 9)
    assert log.deadline_s(odd, 0) == 1.0
    assert log.of_block({**even, "b": [round_event(1, block=1)]}, 0, without=("a",)) == {}


def test_the_curve_is_of_the_last_block_and_counts_all_bytes() -> None:
    logs = {"a": [round_event(1)], "b": [round_event(1, block=1, consensus_ce_nats=3.0)]}
    assert log.curve(logs) == [(1, 2e-6, 3.0)]
    assert log.bytes_by_purpose(logs) == {"update": 2000}
