"""What a host shows: the words for a round, and a line that always fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.host.live_line import (
    HostView,
    RunTimes,
    fitted,
    fleet_line,
    host_line,
    round_line,
    verdict,
)
from swarm.events import NodeEvent, Refusal, RoundEvent, Traffic

TIMES = RunTimes(start_s=1000.0, period_s=12.0, count=120)


def event(**changes: Any) -> RoundEvent:
    values: dict[str, Any] = {
        "time_s": 1500.0,
        "peer": "me",
        "block": 2,
        "round": 41,
        "outcome": "decided",
        "in_time": ("a", "b"),
        "late": ("c",),
        "missing": (),
        "refused": (),
        "agreed": ("a", "b", "me"),
        "left_out": (),
        "included": True,
        "voters": 3,
        "first_deadline_s": 1.0,
        "consensus": "ab" * 32,
        "consensus_round": 41,
        "update_bytes": 9000,
        "traffic": (Traffic("update", 10_000, 20_000),),
        **changes,
    }
    return RoundEvent(**values)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "included"),
        ({"included": False, "left_out": ("me",)}, "left out (an outlier)"),
        ({"included": False, "agreed": ("a",)}, "left out (came too late for most)"),
        (
            {"included": False, "agreed": ("a",), "declined": (Refusal("a", "of harm"),)},
            "left out (by 1 of 3 hosts: of harm)",
        ),
        (
            {"included": False, "outcome": "empty", "declined": (Refusal("a", "of harm"),) * 2},
            "left out (by 2 of 3 hosts: of harm)",
        ),
        ({"included": False, "outcome": "undecided"}, "left out (no majority)"),
        ({"included": False, "outcome": "empty"}, "left out (nothing was agreed)"),
        ({"included": False, "outcome": "syncing"}, "left out (catching up)"),
        ({"included": None, "outcome": "syncing"}, "not sent (catching up)"),
        ({"included": None, "outcome": "missed"}, "not sent (the round was over)"),
        ({"included": None, "update_bytes": 0}, "not sent (not ready in time)"),
        ({"included": None}, "not counted yet"),
    ],
)
def test_a_verdict_says_why(changes: dict[str, Any], words: str) -> None:
    assert verdict(event(**changes)) == words


def test_a_round_in_a_line_of_a_log() -> None:
    line = round_line(event(consensus_ce_nats=2.3456))
    for part in ("block 2", "round 41", "decided", "included", "2 + 1 late", "CE 2.346", "30.0 kB"):
        assert part in line


def view_of(*events: RoundEvent) -> HostView:
    view = HostView()
    for one in events:
        view.hear(one)
    return view


def test_the_live_line_has_all_of_it() -> None:
    view = view_of(event(consensus_ce_nats=2.345, local_ce_nats=2.5), event(round=42))
    line = fitted(host_line(view, TIMES, 5_000_000_000, 1505.0, None), 200)
    for part in ("block 2", "round 42/120", "included", "CE 2.345 own 2.500", "3 peers"):
        assert part in line
    assert "60.0 kB of 5.0 GB today" in line and "next exchange in 11 s" in line


def test_the_day_is_the_hosts_and_not_the_processs() -> None:
    view = HostView()
    view.remember([event(time_s=100.0), NodeEvent(1.0, "me", "left"), event(time_s=90_000.0)])
    assert view.state == "joining" and view.last is None
    assert view.moved_bytes(90_001.0) == 30_000  # the first round is more than a day ago


def test_before_the_first_round_and_in_special_states() -> None:
    view = HostView()
    assert "joining" in fitted(host_line(view, TIMES, None, 1001.0, None), 100)
    view.hear(NodeEvent(1.0, "me", "started"))
    line = fitted(host_line(view, TIMES, None, 1001.0, 3.5), 100)
    assert "loss 3.500" in line and "first exchange" in line
    for what, words in (("paused", "paused"), ("over_budget", "over the budget")):
        view.hear(NodeEvent(1.0, "me", what))
        assert words in fitted(host_line(view, TIMES, None, 1001.0, None), 100)
    view.hear(event())
    assert "included" in fitted(host_line(view, TIMES, None, 1001.0, None), 100)
    view.hear(NodeEvent(1.0, "me", "run_ended"))
    assert "the run is over" in fitted(host_line(view, TIMES, None, 9999.0, None), 100)


def test_the_runs_clock_in_words() -> None:
    assert TIMES.words(990.0) == "the run begins in 10 s"
    assert TIMES.words(1000.0 + 12 * 120) == "the run is over"


def test_traffic_is_that_of_the_last_day() -> None:
    view = view_of(event(time_s=0.0), event(time_s=80_000.0))
    assert view.moved_bytes(80_000.0) == 60_000
    assert view.moved_bytes(90_000.0) == 30_000


def test_workers_in_one_line() -> None:
    own = {"included": False, "left_out": ("me",)}
    views = [
        view_of(event(consensus_ce_nats=2.0)),
        view_of(event(block=3, peer="also me", in_time=("me", "d"), consensus_ce_nats=3.0, **own)),
        HostView(block=1),
    ]
    line = fitted(fleet_line(views, TIMES, None, 1505.0), 200)
    for part in ("3 workers on blocks 2 3 1", "round 41/120", "1 of 2 included", "2.000 to 3.000"):
        assert part in line
    assert "4 peers" in line  # a, b, c, d: our own workers are none


@given(
    width=st.integers(1, 150),
    text=st.text(max_size=40),
    ce=st.floats(0, 10),
    moved=st.integers(0, 10**15),
)
def test_it_never_wraps(width: int, text: str, ce: float, moved: int) -> None:
    view = view_of(event(consensus_ce_nats=ce, traffic=(Traffic("update", moved, moved),)))
    view.state = text
    for parts in (
        host_line(view, TIMES, 10**12, 1505.0, 3.0),
        fleet_line([view] * 20, TIMES, 10**12, 1505.0),
    ):
        line = fitted(parts, width)
        assert len(line) <= width and line.isprintable()


def test_a_narrow_terminal_keeps_what_matters() -> None:
    view = view_of(event(consensus_ce_nats=2.345))
    line = fitted(host_line(view, TIMES, None, 1505.0, None), 40)
    assert line.startswith("block 2  round 41/120  included")


def test_peers_of_a_view() -> None:
    assert view_of(replace(event(), missing=("z",))).peers == {"a", "b", "c", "z"}
    assert HostView().peers == set()
