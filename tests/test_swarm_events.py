"""Lines of the event log go there and back; wrong ones are named."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.events import (
    KINDS,
    EventError,
    MoveEvent,
    NodeEvent,
    Refusal,
    RoundEvent,
    Traffic,
    TrustEvent,
    from_dict,
    from_line,
    to_dict,
    to_line,
)

ROUND = RoundEvent(
    time_s=12.5,
    peer="me",
    block=1,
    round=7,
    outcome="decided",
    in_time=("a", "b"),
    late=("c",),
    missing=(),
    refused=(Refusal("d", "size"),),
    agreed=("a", "b", "me"),
    left_out=("b",),
    included=True,
    voters=4,
    first_deadline_s=2.5,
    consensus="ab" * 32,
    consensus_round=7,
    update_bytes=1000,
    traffic=(Traffic("update", 10, 20),),
    local_ce_nats=1.5,
)


def test_there_and_back() -> None:
    others = (
        MoveEvent(1.0, "me", 0, 3, "aa", "bb", 1, 2, False, "rebase"),
        TrustEvent(1.0, "me", 0, 3, "liar", "digest", 9),
        NodeEvent(1.0, "me", "started", facts={"version": "1"}),
    )
    for event in (ROUND, *others):
        assert from_line(to_line(event)) == event


def test_unknown_fields_are_ignored() -> None:
    assert from_dict({**to_dict(ROUND), "new_field": 1}) == ROUND


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"v": 2}, "version"),
        ({"kind": "party"}, "kind"),
        ({"kind": ["round"]}, "kind"),
        ({"round": "7"}, "round.round"),
        ({"round": True}, "round.round"),
        ({"outcome": "fine"}, "outcome"),
        ({"in_time": "a"}, "in_time"),
        ({"in_time": [1]}, "in_time"),
        ({"refused": [{"peer": "d"}]}, "reason"),
        ({"traffic": [{"purpose": "x", "sent_bytes": 1, "received_bytes": 1}]}, "traffic"),
        ({"traffic": [{"purpose": "vote", "sent_bytes": -1, "received_bytes": 1}]}, "traffic"),
        ({"local_ce_nats": float("inf")}, "local_ce_nats"),
        ({"included": 1}, "included"),
    ],
)
def test_wrong_lines_are_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(EventError, match=named):
        from_dict({**to_dict(ROUND), **change})


@given(
    st.text(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)
)
def test_any_other_line_is_refused(line: str) -> None:
    with pytest.raises(EventError):
        from_line(line)


def test_long_lines_are_refused() -> None:
    with pytest.raises(EventError):
        from_line(" " * 100_000)


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parent.parent / "docs" / "events.md").read_text()
    for kind in KINDS.values():
        for f in fields(kind):
            assert f"`{f.name}`" in text, f.name
