"""The storm: what it makes of event logs and of processes, and a real one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.storm import checks
from benchmarks.storm.checks import Excuse, Sample
from benchmarks.storm.faults import Storm
from benchmarks.storm.rows import kept_logs, run
from benchmarks.storm.swarm import HOSTS, PERIOD_S, QUICK_HOSTS, storm_run
from benchmarks.storm.swarm import topology as storm_topology
from benchmarks.wan import events as log
from benchmarks.wan.bed import Bed
from benchmarks.wan.processes import START_S
from benchmarks.wan.runner import SwarmOnBed
from benchmarks.wan.topology import parse as parse_topology
from swarm.run_template import emit
from swarm.runfile import parse
from tests.support.processes import ends
from tests.support.round_events import round_event


def test_a_silence_is_a_hang_unless_the_host_was_down() -> None:
    logs = {"a": [round_event(n) for n in (0, 1, 2, 8, 9)]}  # silent from 110 s to 140 s
    storm_span = (100.0, 150.0)
    assert [h[0] for h in checks.hangs(logs, [], 5.0, storm_span)] == ["a"]
    assert not checks.hangs(logs, [Excuse("a", 112, 135)], 5.0, storm_span)
    assert checks.hangs(logs, [Excuse("b", 112, 135)], 5.0, storm_span)
    assert checks.hangs(logs, [Excuse("a", 112, 135)], 5.0, (100.0, 170.0))  # never again


def test_disagreement_may_last_three_rounds_and_a_partition() -> None:
    def logs(split: range) -> dict[str, list[log.Event]]:
        other = [round_event(n, consensus="x" if n in split else f"c{n}") for n in range(20)]
        return {"a": [round_event(n) for n in range(20)], "b": other}

    assert checks.disagreements(logs(range(5, 8)), []) == []
    assert checks.disagreements(logs(range(5, 9)), []) == [(0, 5, 4)]
    assert checks.disagreements(logs(range(5, 12)), [range(5, 10)]) == []
    assert checks.disagreements(logs(range(16, 20)), []) == [(0, 16, 4)]


def test_a_disagreement_is_told_with_who_stood_where() -> None:
    logs = {
        "a": [round_event(4), round_event(5)],
        "b": [round_event(5, consensus="x", outcome="syncing")],
    }
    first, second = checks.stands(logs, 0, range(5, 7))
    assert first.startswith("5 a: c5 of round 5, decided")
    assert second.startswith("5 b: x of round 5, syncing")
    assert "python" in checks.words(os.getpid()) and checks.words(2**30) == "gone by now"


def test_lost_and_undecided_rounds() -> None:
    logs = {"a": [round_event(1), round_event(2), round_event(3, consensus_round=0)]}
    assert checks.lost_rounds(logs) == 2
    assert checks.lost_rounds({"a": [round_event(1), round_event(2)]}) == 0
    logs = {"a": [round_event(n, outcome="empty" if n == 2 else "decided") for n in range(5)]}
    assert checks.undecided_rounds(logs, 4) == 1
    logs["b"] = [round_event(2)]  # somebody decided it
    assert checks.undecided_rounds(logs, 4) == 0


def test_a_liar_that_is_left_out_is_seen_and_not_counted() -> None:
    events = [
        round_event(1, refused=[{"peer": "liar", "reason": "size"}]),
        round_event(2, agreed=["liar"], left_out=["liar"]),
        round_event(3, agreed=["liar"]),
        round_event(4),
    ]
    assert checks.left_out({"a": events}, "liar") == (1, 3)


def test_growth_is_from_when_a_host_had_settled() -> None:
    samples = [Sample(float(t), 100 + (50 if t < 20 else t), 10, 5) for t in range(100)]
    found = checks.growth({"a": samples}, 100.0)
    assert found["memory_growth_percent"] == pytest.approx(100 * (187 / 137.5 - 1), abs=1)
    assert found["descriptor_growth"] == found["thread_growth"] == 0
    more = [replace(s, threads=5 + (s.at_s > 50), parts={"p2pd threads": 3}) for s in samples]
    found = checks.growth({"a": more}, 100.0)
    assert found["thread_growth"] == found["own_thread_growth"] == 1
    of_p2pd = [replace(s, parts={"p2pd threads": s.threads - 2}) for s in more]
    found = checks.growth({"a": of_p2pd}, 100.0)
    assert found["thread_growth"] == 1 and found["own_thread_growth"] == 0
    first, last = checks.ce_ends({"a": [round_event(n) for n in range(20)]})
    assert first > last


def test_what_a_host_holds_is_told_by_process_and_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = checks.sample(os.getpid(), 1.0)
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            after = checks.sample(os.getpid(), 2.0)
    # Both ends are ours, and both are the same far host.
    assert after.parts["node tcp open"] == before.parts.get("node tcp open", 0) + 2
    assert after.descriptors == before.descriptors + 2
    assert after.peers == before.peers + (1 if not before.peers else 0)
    assert after.threads >= 1 and after.rss_bytes > 1_000_000
    samples = [replace(before, at_s=30.0), replace(after, at_s=90.0)]
    found = checks.held(samples, 100.0)
    assert found["at the end"]["node tcp open"] == after.parts["node tcp open"]
    assert found["settled"]["peers"] == before.peers


def test_an_orphan_is_what_runs_and_not_what_is_ending(tmp_path: Path) -> None:
    for pid, status in (
        (10, "Name:\tp2pd\nState:\tS (sleeping)\nVmSize:\t  100 kB\n"),
        (11, "Name:\tp2pd\nState:\tZ (zombie)\n"),  # its parent has not asked yet how it ended
        (12, "Name:\tp2pd\nState:\tR (running)\n"),  # its memory is gone: it ends right now
        (13, "Name:\tVmSize:\nState:\tD (disk sleep)\nVmSize:\t  100 kB\n"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / f"{pid}/status").write_text(status)
    assert checks.alive([10, 11, 12, 13, 14], tmp_path) == [10, 13]


def test_a_real_process_is_alive_until_it_has_ended() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert checks.alive([child.pid, os.getpid()]) == [child.pid, os.getpid()]
    child.kill()
    assert ends(child.pid, 10.0)
    assert checks.alive([child.pid]) == []  # a zombie: nobody has asked yet
    child.wait()
    assert checks.alive([child.pid]) == []


@pytest.mark.parametrize("hosts", [HOSTS, QUICK_HOSTS])
def test_the_storms_topology_and_run(hosts: tuple[str, ...]) -> None:
    found = parse_topology(storm_topology(hosts).encode())
    assert [h.name for h in found.hosts if h.role == "seed"] == ["seed"]
    assert {h.name for h in found.hosts if h.role == "none"} == {"liar", "new"}
    assert parse(emit(storm_run(50))) == storm_run(50)


def test_logs_of_a_storm_that_failed_are_kept(tmp_path: Path) -> None:
    for name in ("ann-0", "bob-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text(name)
        (tmp_path / name / "weights").write_bytes(bytes(100))
    kept = kept_logs(tmp_path)
    try:
        found = sorted(str(place.relative_to(kept)) for place in kept.rglob("*.*"))
        assert found == ["ann-0/events.jsonl", "bob-0/events.jsonl"]
        assert (kept / "bob-0/events.jsonl").read_text() == "bob-0"
    finally:
        shutil.rmtree(kept)


@pytest.mark.long
def test_five_minutes_of_storm(wan_rights: None) -> None:
    """Takes about seven minutes with the start."""
    figures, rows = run(quick=False)
    shown = "\n".join(map(str, [figures, *rows]))
    assert figures["faults"] >= 9, shown
    for name in ("hangs", "orphans", "digest_disagreements", "lies_counted"):
        assert figures[name] == 0, shown
    assert figures["lost_rounds"] <= 1, shown
    assert figures["ce_last"] < figures["ce_first"], shown
    assert figures["memory_growth_percent"] < 25, shown
    assert figures["descriptor_growth"] < 30 and figures["thread_growth"] < 20, shown
    assert figures["own_thread_growth"] <= 2, shown


@pytest.mark.long
def test_partition_after_partition_leaves_no_descriptors_or_threads(
    tmp_path: Path, wan_rights: None
) -> None:
    """A partition leaves a second connection to a peer; the next ones leave no more. 3 minutes."""
    seconds, every = 165.0, 45.0
    rounds = int((seconds + 2 * START_S) / PERIOD_S)
    (tmp_path / "run.toml").write_bytes(emit(storm_run(rounds)))
    with Bed(storm_topology(QUICK_HOSTS)) as bed:
        swarm = SwarmOnBed(bed, tmp_path, tmp_path, lambda line: None)
        swarm.start()
        swarm.until_all_train()
        weather = Storm(swarm, lambda line: None)
        schedule: list[tuple[float, Callable[[], None]]] = []
        for number in range(3):
            schedule.append((10 + number * every, lambda: weather.cut("bob", "cem")))
            schedule.append((24 + number * every, weather.heal))
        weather.weather(schedule, seconds)
        assert not bed.stop_processes()
    for name, samples in weather.samples.items():
        first, last = (
            [s for s in samples if from_s <= s.at_s < to_s]
            for from_s, to_s in ((40.0, 10 + every), (40.0 + 2 * every, seconds))
        )
        assert first and last, name
        for what in ("descriptors", "threads"):
            before, after = (max(getattr(s, what) for s in part) for part in (first, last))
            assert after <= before + 4, (name, what, before, after)
