"""Figures from event logs, checked by hand; damaged and hostile logs; the page escapes all."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.report import logs as report_logs
from node.report.figures import COUNT_BOTH, COUNT_SENT, UNIFORM_CE_NATS, RunReport, Scale, analyse
from node.report.html import STATES, page, state
from node.report.logs import Budget, Log, ReportError, read_log
from node.report.svg import clean, line_chart, strips, ticks
from swarm.events import (
    LogEvent,
    MoveEvent,
    NodeEvent,
    Refusal,
    RoundEvent,
    Traffic,
    TrustEvent,
    to_dict,
    to_line,
)

SCALE = Scale("tiny", step_bytes=100, steps_per_round=10)


def closed(peer: str = "a", number: int = 1, **changes: Any) -> RoundEvent:
    event = RoundEvent(
        time_s=1000.0 + 10 * number,
        peer=peer,
        block=0,
        round=number,
        outcome="decided",
        in_time=(),
        late=(),
        missing=(),
        refused=(),
        agreed=(),
        left_out=(),
        included=True,
        voters=2,
        first_deadline_s=1.0,
        consensus="c" * 64,
        consensus_round=number,
        update_bytes=10,
        traffic=(Traffic("update", 100, 100),),
        steps=10,
    )
    return replace(event, **changes)


def made(*events: LogEvent, scale: Scale | None = SCALE) -> RunReport:
    peers = sorted({event.peer for event in events})
    return analyse("run", [Log(p, tuple(e for e in events if e.peer == p)) for p in peers], scale)


def lines(*events: LogEvent) -> bytes:
    return b"".join(to_line(event).encode() + b"\n" for event in events)


def read(data: bytes, budget: Budget | None = None) -> Log:
    return read_log(io.BytesIO(data), "log", budget or Budget())


# Figures.


def test_gb_per_nat_counts_each_byte_once() -> None:
    found = made(
        closed("a", 1, consensus_ce_nats=5.0, in_time=("b",)),
        closed("b", 1, consensus_ce_nats=5.0, in_time=("a",)),
        closed("a", 2, consensus_ce_nats=4.0, traffic=(Traffic("vote", 50, 60),)),
        closed("b", 2, consensus_ce_nats=4.0, traffic=(Traffic("vote", 60, 50),)),
    )
    assert (found.counting, found.moved_bytes) == (COUNT_SENT, 310)
    assert found.purposes == {"update": 200, "vote": 110}
    assert (found.first_ce_nats, found.last_ce_nats) == (5.0, 4.0)
    assert found.gb_per_nat == pytest.approx(310e-9)
    assert found.gb_per_nat_from_uniform == pytest.approx(310e-9 / (math.log(256) - 4.0))
    assert (found.steps, found.seen_bytes, found.seconds) == (40, 4000, 10.0)


@pytest.mark.parametrize(
    ("events", "moved_bytes"),
    [
        ([closed("a", traffic=(Traffic("update", 100, 70),))], 170),
        ([closed("a", in_time=("x",)), closed("b")], 400),
        ([closed("a", agreed=("x",)), closed("b")], 400),
        ([closed("a", traffic=(Traffic("relay", 900, 100),)), closed("b")], 1200),
    ],
    ids=["one host", "unknown sender", "unknown contributor", "sent and received differ"],
)
def test_some_hosts_only(events: list[LogEvent], moved_bytes: int) -> None:
    found = made(*events)
    assert (found.counting, found.moved_bytes) == (COUNT_BOTH, moved_bytes)
    assert sum(found.purposes.values()) == moved_bytes


def test_clients_without_a_log_do_not_make_it_incomplete() -> None:
    found = made(closed("a", traffic=(Traffic("assembly", 5000, 10),)), closed("b"))
    assert (found.counting, found.moved_bytes) == (COUNT_SENT, 5100)


def test_no_gain_has_no_price() -> None:
    found = made(closed(consensus_ce_nats=6.0), closed(number=2, consensus_ce_nats=6.5))
    assert found.gb_per_nat is None and found.gb_per_nat_from_uniform is None
    assert made(closed()).gb_per_nat is None
    assert made(closed()).last_ce_nats is None


def test_ce_of_blocks_and_their_mean() -> None:
    found = made(
        closed("a", 1, consensus_ce_nats=5.0, local_ce_nats=4.0),
        closed("b", 1, block=1, consensus_ce_nats=4.0),
        closed("c", 1, consensus_ce_nats=5.0, local_ce_nats=2.0),
        closed("a", 2, consensus_ce_nats=5.0),  # repeated: not measured again
        closed("a", 3, consensus_ce_nats=3.0),
        closed("b", 3, block=1, consensus_ce_nats=2.0),
    )
    series = {(s.block, s.which): s.points for s in found.series}
    assert [(p.round, p.ce_nats) for p in series[0, "consensus"]] == [(1, 5.0), (3, 3.0)]
    assert [(p.round, p.ce_nats) for p in series[0, "local"]] == [(1, 3.0)]
    mean = series[None, "consensus"]
    assert [(p.round, p.ce_nats) for p in mean] == [(1, 4.5), (3, 2.5)]
    last = series[0, "consensus"][-1]  # 4 lines of block 0, 5 lines of the run until then
    assert (last.steps, last.seen_bytes, last.seconds, last.moved_bytes) == (40, 4000, 20.0, 500)
    assert (mean[-1].steps, mean[-1].moved_bytes) == (30, 600)
    assert (found.first_ce_nats, found.last_ce_nats) == (4.5, 2.5)


def test_without_a_run_file_steps_stand_for_text() -> None:
    found = made(closed(consensus_ce_nats=5.0), scale=None)
    assert found.seen_bytes is None and found.series[0].points[0].seen_bytes is None
    assert found.series[0].points[0].steps == 10
    assert any("run.toml" in note for note in found.notes)
    assert "steps of a block" in page([found])


def test_running_totals_of_steps() -> None:
    found = made(*(closed(number=n, steps=10 * n) for n in range(1, 5)))
    assert found.steps == 40
    assert any("running totals" in note for note in found.notes)
    assert made(*(closed(number=n, steps=10) for n in range(1, 5))).steps == 40


def test_participation() -> None:
    found = made(
        closed("a", 1, in_time=("b",), missing=("x",)),
        closed("a", 2, late=("b",), included=False, refused=(Refusal("x", "size"),)),
        closed("a", 3, included=None, outcome="undecided", left_out=("b",), agreed=("b",)),
        closed("b", 3, left_out=("b",), outcome="syncing"),
        TrustEvent(1031.0, "a", 0, 3, "x", "lied", 9),
    )
    hosts = {host.peer: host for host in found.hosts}
    a, b, x = hosts["a"], hosts["b"], hosts["x"]
    assert (a.rounds, a.included, a.not_included, a.included_share) == (3, 1, 1, 0.5)
    assert a.outcomes == {"decided": 2, "undecided": 1}
    assert (b.in_time, b.late, b.left_out_rounds, b.logged) == (1, 1, 1, True)
    assert (x.missing, x.refused, x.exclusions, x.logged) == (1, 1, 1, False)
    assert x.included_share is None
    assert found.outcomes == {"decided": 2, "undecided": 1, "syncing": 1}
    assert (found.blocks[0].rounds, found.blocks[0].decided_rounds) == (3, 2)
    assert [state(row) for row in found.rows] == ["included", "not-included", "undecided", "away"]


def test_agreement_is_by_the_round_of_the_consensus() -> None:
    found = made(
        closed("a", 1),
        closed("b", 1),
        closed("a", 2, consensus="d" * 64),
        closed("b", 2, consensus="e" * 64),
        closed("b", 3, consensus_round=2, consensus="d" * 64),  # it moved
        closed("a", 4),  # nobody to compare with
    )
    assert found.heads == {(0, 1): 1, (0, 2): 2}
    block = found.blocks[0]
    assert (block.compared_rounds, block.agreed_rounds, block.most_heads) == (2, 1, 2)


def test_timeline() -> None:
    found = made(
        NodeEvent(1000.0, "a", "started", "hello", {"port": "1"}),
        MoveEvent(1005.0, "a", 0, 1, "0" * 64, "f" * 64, 2, 3, True, "merge"),
        TrustEvent(1007.0, "a", 0, 1, "x", "lied", 9),
    )
    assert [(m.seconds, m.what) for m in found.moments] == [
        (0.0, "started"),
        (5.0, "moved"),
        (7.0, "excluded"),
    ]
    assert found.moments[0].detail == "hello port=1"
    assert "2 steps of the log undone and 3 made, from a snapshot" in found.moments[1].detail
    assert "x until round 9: lied" in found.moments[2].detail
    assert any("closed no round" in note for note in found.notes)
    assert "No rounds were logged" in page([found])


def test_no_events() -> None:
    with pytest.raises(ReportError, match="no events in run"):
        made()


def test_a_copied_log_is_noted() -> None:
    log = Log("h0", (closed(),))
    found = analyse("run", [log, replace(log, source="copy")], SCALE)
    assert any("is in 2 logs" in note for note in found.notes)


# Reading.


def test_reads_what_hosts_write() -> None:
    events = (closed(), NodeEvent(1.0, "a", "left"))
    assert read(lines(*events)) == Log("log", events)


def test_cut_last_line() -> None:
    log = read(lines(closed()) + lines(closed(number=2))[:-30])
    assert len(log.events) == 1
    assert log.notes == ("log: the last line is cut off, as by a killed writer; left out",)


def test_damage_in_the_middle() -> None:
    log = read(lines(closed()) + b'{"v":1\n\xff\xfe\n[]\n\n' + lines(closed(number=2)))
    assert [e.round for e in log.events if isinstance(e, RoundEvent)] == [1, 2]
    assert log.notes == ("log: left out 3 damaged lines, the first is 2",)


@pytest.mark.parametrize("version", [0, 2, 10**12])
def test_other_schema_is_refused(version: int) -> None:
    data = json.dumps({**to_dict(closed()), "v": version}).encode()
    with pytest.raises(ReportError, match=f"line 2: event log of schema version {version}"):
        read(lines(closed()) + data)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": -1},
        {"steps": 10**300},
        {"block": 1024},
        {"round": -2},
        {"time_s": 10**400},
        {"time_s": -1.0},
        {"time_s": 1e300},
        {"consensus_ce_nats": 1e300},
        {"local_ce_nats": -0.1},
        {"traffic": [{"purpose": "vote", "sent_bytes": 2**60, "received_bytes": 0}]},
        {"traffic": [{"purpose": "vote", "sent_bytes": -1, "received_bytes": 0}]},
    ],
)
def test_nonsense_numbers_are_left_out(changes: dict[str, object]) -> None:
    log = read(json.dumps({**to_dict(closed()), **changes}).encode() + b"\n" + lines(closed()))
    assert len(log.events) == 1 and "1 damaged lines" in log.notes[0]


def test_long_line_costs_no_more_than_its_pieces() -> None:
    log = read(lines(closed()) + b"x" * 300_000 + b"\n" + lines(closed(number=2)))
    assert len(log.events) == 2 and "damaged" in log.notes[0]


def test_deep_nesting() -> None:
    assert not read(b"[" * 60_000 + b"\n").events


@pytest.mark.parametrize("budget", [Budget(lines=2), Budget(size_bytes=1500)])
def test_budget_is_for_all_logs(budget: Budget) -> None:
    first, second = read(lines(closed()), budget), read(lines(*[closed()] * 9), budget)
    assert len(first.events) == 1 and not first.notes
    assert len(second.events) < 9
    assert f"reads {report_logs.MAX_LINES} lines and 128 MiB at most" in second.notes[0]


@given(
    st.lists(st.integers(1, 9), max_size=4),
    st.lists(st.tuples(st.integers(0, 4000), st.binary(max_size=4)), max_size=6),
)
def test_damaged_files_never_break_the_report(
    rounds: list[int], damage: list[tuple[int, bytes]]
) -> None:
    data = bytearray(lines(*(closed(number=n, consensus_ce_nats=float(n)) for n in rounds)))
    for at, what in damage:
        data[at : at + len(what)] = what
    try:
        log = read(bytes(data))
        found = analyse("run", [log], SCALE)
    except ReportError:
        return
    assert len(log.events) <= len(rounds)
    json.dumps(found.facts(), allow_nan=False)
    page([found])


@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    assert not read(data).events


# The page.


class Tags(HTMLParser):
    """All tags and attributes of a page, and whether they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert not tags.open
    return tags


EVIL = "<script>alert(1)</script>\"'><img src=x onerror=y>\x1b[31m"


def evil_run() -> RunReport:
    peer = f"{EVIL}aaaaaaaaaaaaaaaa"
    found = made(
        closed(peer, in_time=(EVIL,), agreed=(EVIL,), left_out=("\ud800",), consensus=EVIL),
        closed("b", refused=(Refusal(EVIL, EVIL),)),
        NodeEvent(1.0, EVIL, EVIL, EVIL, {EVIL: EVIL}),
        TrustEvent(2.0, "b", 0, 1, EVIL, EVIL, 5),
        MoveEvent(3.0, "b", 0, 1, EVIL, EVIL, 0, 0, False, "keep"),
    )
    return replace(found, name=EVIL, notes=(EVIL,), scale=Scale(EVIL, 1, 1))


def test_page_is_escaped_and_asks_for_nothing() -> None:
    text = page([evil_run(), evil_run()])
    tags = parsed(text)
    assert not tags.seen & {"script", "img", "link", "iframe", "object"}
    names = {name for name, _ in tags.attributes}
    assert not names & {"src", "href", "onerror", "onload"}
    assert "\x1b" not in text and "url(" not in text and "@import" not in text
    text.encode()  # no lone surrogate
    assert "default-src 'none'" in text


def test_page_has_the_figures() -> None:
    found = made(
        closed("a", 1, consensus_ce_nats=5.0, local_ce_nats=4.5),
        closed("b", 1, consensus_ce_nats=5.0),
        closed("a", 2, consensus_ce_nats=4.0, included=False),
    )
    text = page([found])
    parsed(text)
    for wanted in ("5.000 → 4.000", "each byte counted once", "not included", "CE over", "2 of 3"):
        assert wanted in text
    assert "prefers-color-scheme: dark" in text
    assert "Runs compared" not in text and "Runs compared" in page([found, found])
    assert f"{UNIFORM_CE_NATS:.3f}" in text


def test_large_runs_stay_small_pages() -> None:
    peers = [f"peer-{n:04}" for n in range(400)]
    events = [closed(p, n, consensus_ce_nats=5 - n / 1000) for p in peers[:80] for n in range(50)]
    events += [closed("a", 60 + n, missing=tuple(peers)) for n in range(3000)]
    text = page([made(*events)])
    assert len(text) < 2_000_000
    assert "more: see --json" in text


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    high = low + span
    if high - low < 1e-9 * max(abs(low), 1):
        return
    found = ticks(low, high)
    assert len(found) <= 7
    assert all(low - span * 1e-3 <= t <= high + span * 1e-3 for t in found)


points = st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1000)), max_size=900)


@given(points)
def test_any_line_can_be_drawn(found: list[tuple[float, float]]) -> None:
    from node.report.svg import Curve

    text = line_chart("x", "y", [Curve("one", 0, found), Curve("two", -1, found, True)])
    parsed(text)
    assert "nan" not in text and "inf" not in text
    assert len(text) < 60_000


@given(st.dictionaries(st.integers(0, 2**53), st.sampled_from(STATES), max_size=50))
def test_any_strip_can_be_drawn(cells: dict[int, str]) -> None:
    parsed(strips({"a": cells}, STATES))


def test_a_cell_of_many_rounds_shows_the_worst() -> None:
    cells: Iterable[tuple[int, str]] = ((n, "included") for n in range(1200))
    text = strips({"a": dict(cells) | {605: "not-included"}}, STATES)
    assert text.count('class="cell not-included"') == 1
    assert text.count('class="cell included"') == 119


def test_clean() -> None:
    assert clean("a<b>\n\ud800") == "a&lt;b&gt;��"
    assert len(clean("x" * 10_000)) == 300
