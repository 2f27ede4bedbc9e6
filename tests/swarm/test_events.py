"""Lines of the event log go there and back; wrong ones are named."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields

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
from tests.support.paths import ROOT

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
        ({"time_s": 10**400}, "time_s"),
        ({"first_deadline_s": -(10**400)}, "first_deadline_s"),
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


def test_an_integer_of_hundreds_of_digits_is_no_time() -> None:
    line = to_line(ROUND).replace('"time_s":12.5', '"time_s":1' + 400 * "0")
    with pytest.raises(EventError, match="time_s"):
        from_line(line)


def test_long_lines_are_refused() -> None:
    with pytest.raises(EventError):
        from_line(" " * 100_000)


def test_every_field_is_documented() -> None:
    text = (ROOT / "docs" / "events.md").read_text()
    for kind in KINDS.values():
        for f in fields(kind):
            assert f"`{f.name}`" in text, f.name


def test_every_event_that_hosts_write_is_documented_and_no_other() -> None:
    """Whatever stands in the source as the `what` of an event."""
    place = {"_note": 0, "note": 0, "tell": 0, "NodeEvent": 2}
    found: set[object] = set()
    for path in (ROOT / "node").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name in place and len(call.args) > place[name]:
                what = call.args[place[name]]
                ways = [what.body, what.orelse] if isinstance(what, ast.IfExp) else [what]
                found |= {way.value for way in ways if isinstance(way, ast.Constant)}
    table = (ROOT / "docs" / "events.md").read_text().partition("| `what` | when |")[2]
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    assert found == set(re.findall(r"`(\w+)`", " ".join(rows)))
