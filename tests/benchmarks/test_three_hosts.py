"""The public-network experiments and the storm: what they make of event logs, and a real storm."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import storm, storm_checks, three_hosts
from benchmarks import three_hosts_events as log
from benchmarks.storm_checks import Excuse, Sample
from benchmarks.three_hosts_swarm import SPARSE, expected_bytes, start_ce
from benchmarks.wan import topology
from benchmarks.wan.bed import Bed
from benchmarks.wan.processes import START_S
from benchmarks.wan.runner import SwarmOnBed
from node.data.corpus import load_corpus
from swarm.run_template import emit
from swarm.runfile import parse
from tests.support.processes import ends


def _round(number: int, **changes: Any) -> log.Event:
    event: log.Event = {
        "kind": "round",
        "time_s": 100.0 + 5 * number,
        "peer": "me",
        "block": 0,
        "round": number,
        "outcome": "decided",
        "in_time": [],
        "late": [],
        "refused": [],
        "agreed": [],
        "left_out": [],
        "included": True,
        "first_deadline_s": 1.0,
        "consensus": f"c{number}",
        "consensus_round": number,
        "update_bytes": 10,
        "traffic": [{"purpose": "update", "sent_bytes": 1000, "received_bytes": 0}],
        "consensus_ce_nats": 5.0 - number / 10,
        "steps": 3,
    }
    return {**event, **changes}


# --- the experiments ------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_every_row_is_a_run_and_a_topology(quick: bool) -> None:
    table = three_hosts.variants(quick)
    assert len({v.key for v in table}) == len({v.name for v in table}) == len(table)
    for variant in table:
        found = topology.parse(variant.plan.topology.encode())
        workers = sum(h.workers for h in found.hosts if h.role != "none")
        assert workers == variant.workers
        blocks = [place % variant.shape.blocks for place in range(workers)]
        assert min(blocks.count(b) for b in range(variant.shape.blocks)) >= 2  # all exchange
        read = parse(emit(variant.plan.run))
        assert read == variant.plan.run
        assert variant.plan.load(workers) < 0.6, "two cores must keep up, with room for the rest"
        assert variant.plan.seconds < 40 * 60


def test_sparse_and_dense_differ_in_the_codec_alone() -> None:
    sparse, dense = three_hosts.variants(quick=False)[:2]
    assert replace(sparse, name=dense.name, codec=dense.codec) == dense
    assert (sparse.codec, dense.codec) == (SPARSE, "fp32")


def test_replicas_of_a_block_are_on_different_hosts() -> None:
    variant = three_hosts.variants(quick=False)[0]
    hosts = [h for h in topology.parse(variant.plan.topology.encode()).hosts if h.role != "none"]
    places = [host.name for host in hosts for _ in range(host.workers)]
    for block in range(variant.shape.blocks):
        holders = places[block :: variant.shape.blocks]
        assert len(set(holders)) == len(holders) == 2


def test_the_control_differs_by_the_slow_host_alone() -> None:
    ten, control = three_hosts.variants(quick=False)[3:]
    slow = topology.parse(ten.plan.topology.encode())
    even = topology.parse(control.plan.topology.encode())
    assert [h.name for h in slow.hosts if h != even.host(h.name)] == ["slow"]
    assert slow.host("slow").cpu_percent == 10 and even.host("slow").cpu_percent == 0
    assert slow.host("slow").link.up_mbit == even.host("slow").link.up_mbit / 10
    assert sum(h.nat for h in slow.hosts) == 2
    assert slow.host("lossy").link.loss_percent == 5


def test_figures_of_rows_that_are_there() -> None:
    one = {
        "ce_start": 5.6,
        "ce_end": 1.6,
        "gb_moved": 0.04,
        "gb_per_nat": 0.01,
        "ledger_error_percent": 2.0,
        "included_percent": 100.0,
    }
    assert three_hosts.figures([]) == {}
    found = three_hosts.figures(
        [{"name": "sparse", **one}, {"name": "dense", **one, "gb_per_nat": 0.8}]
    )
    assert found["dense_ratio"] == pytest.approx(80) and found["gb_per_nat_dense"] == 0.8
    ten = {"nat_included": 0.9, "ce_end": 2.0, "slow_rounds": 9}
    ten |= {"others_round_s": 10.5, "others_deadline_s": 2.0}
    even = {**ten, "others_round_s": 10.0, "others_deadline_s": 1.5}
    found = three_hosts.figures([{"name": "ten", **ten}, {"name": "ten, none slow", **even}])
    assert found["slow_host_delay_percent"] == pytest.approx(5)
    assert found["slow_host_wait_percent"] == pytest.approx(5)


def test_the_start_is_that_of_an_untrained_model() -> None:
    run = three_hosts.variants(quick=True)[0].plan.run
    assert 5.5 < start_ce(run, load_corpus("python"), 4096) < 5.7


def test_a_half_written_line_is_left_for_later(tmp_path: Path) -> None:
    assert log.read(tmp_path) == []
    (tmp_path / "events.jsonl").write_text('{"kind":"node","what":"started"}\n{"kind":')
    assert log.read(tmp_path) == [{"kind": "node", "what": "started"}]
    assert log.said(log.read(tmp_path), "started")
    assert not log.said(log.read(tmp_path), "left")


def test_who_took_part() -> None:
    late = [_round(n, included=n > 4) for n in range(3, 8)]
    logs = {
        "a": [_round(n) for n in range(8)],
        "b": [_round(0, included=None, update_bytes=0), *late],
    }
    assert log.common_first(logs) == 5
    assert log.included_share(logs, 3) == pytest.approx(8 / 10)
    assert log.included_share({}) == 0.0


def test_an_undecided_round_makes_the_others_longer() -> None:
    even = {"a": [_round(n) for n in range(10)]}
    assert log.seconds_per_decision(even, 0) == pytest.approx(5)
    odd = {"a": [_round(n, outcome="empty" if n == 4 else "decided") for n in range(10)]}
    assert log.seconds_per_decision(odd, 0) == pytest.approx(50 / 9)
    assert log.deadline_s(odd, 0) == 1.0
    assert log.of_block({**even, "b": [_round(1, block=1)]}, 0, without=("a",)) == {}


def test_the_curve_is_of_the_last_block_and_counts_all_bytes() -> None:
    logs = {"a": [_round(1)], "b": [_round(1, block=1, consensus_ce_nats=3.0)]}
    assert log.curve(logs) == [(1, 2e-6, 3.0)]
    assert log.bytes_by_purpose(logs) == {"update": 2000}


def test_the_documented_overhead_of_large_and_of_small_frames() -> None:
    assert 1.03 < expected_bytes(10**8, 100, 0) / 1e8 < 1.07
    assert expected_bytes(1000, 10, 0) > 1000 + 10 * 52
    assert expected_bytes(0, 0, 77) == 77


# --- the storm ------------------------------------------------------------------------------------


def test_a_silence_is_a_hang_unless_the_host_was_down() -> None:
    logs = {"a": [_round(n) for n in (0, 1, 2, 8, 9)]}  # silent from 110 s to 140 s
    storm_span = (100.0, 150.0)
    assert [h[0] for h in storm_checks.hangs(logs, [], 5.0, storm_span)] == ["a"]
    assert not storm_checks.hangs(logs, [Excuse("a", 112, 135)], 5.0, storm_span)
    assert storm_checks.hangs(logs, [Excuse("b", 112, 135)], 5.0, storm_span)
    assert storm_checks.hangs(logs, [Excuse("a", 112, 135)], 5.0, (100.0, 170.0))  # never again


def test_disagreement_may_last_three_rounds_and_a_partition() -> None:
    def logs(split: range) -> dict[str, list[log.Event]]:
        other = [_round(n, consensus="x" if n in split else f"c{n}") for n in range(20)]
        return {"a": [_round(n) for n in range(20)], "b": other}

    assert storm_checks.disagreements(logs(range(5, 8)), []) == []
    assert storm_checks.disagreements(logs(range(5, 9)), []) == [(0, 5, 4)]
    assert storm_checks.disagreements(logs(range(5, 12)), [range(5, 10)]) == []
    assert storm_checks.disagreements(logs(range(16, 20)), []) == [(0, 16, 4)]


def test_a_disagreement_is_told_with_who_stood_where() -> None:
    logs = {"a": [_round(4), _round(5)], "b": [_round(5, consensus="x", outcome="syncing")]}
    first, second = storm_checks.stands(logs, 0, range(5, 7))
    assert first.startswith("5 a: c5 of round 5, decided")
    assert second.startswith("5 b: x of round 5, syncing")
    assert (
        "python" in storm_checks.words(os.getpid()) and storm_checks.words(2**30) == "gone by now"
    )


def test_lost_and_undecided_rounds() -> None:
    logs = {"a": [_round(1), _round(2), _round(3, consensus_round=0)]}
    assert storm_checks.lost_rounds(logs) == 2
    assert storm_checks.lost_rounds({"a": [_round(1), _round(2)]}) == 0
    logs = {"a": [_round(n, outcome="empty" if n == 2 else "decided") for n in range(5)]}
    assert storm_checks.undecided_rounds(logs, 4) == 1
    logs["b"] = [_round(2)]  # somebody decided it
    assert storm_checks.undecided_rounds(logs, 4) == 0


def test_a_liar_that_is_left_out_is_seen_and_not_counted() -> None:
    events = [
        _round(1, refused=[{"peer": "liar", "reason": "size"}]),
        _round(2, agreed=["liar"], left_out=["liar"]),
        _round(3, agreed=["liar"]),
        _round(4),
    ]
    assert storm_checks.left_out({"a": events}, "liar") == (1, 3)


def test_growth_is_from_when_a_host_had_settled() -> None:
    samples = [Sample(float(t), 100 + (50 if t < 20 else t), 10, 5) for t in range(100)]
    found = storm_checks.growth({"a": samples}, 100.0)
    assert found["memory_growth_percent"] == pytest.approx(100 * (187 / 137.5 - 1), abs=1)
    assert found["descriptor_growth"] == found["thread_growth"] == 0
    more = [replace(s, threads=5 + (s.at_s > 50), parts={"p2pd threads": 3}) for s in samples]
    found = storm_checks.growth({"a": more}, 100.0)
    assert found["thread_growth"] == found["own_thread_growth"] == 1
    of_p2pd = [replace(s, parts={"p2pd threads": s.threads - 2}) for s in more]
    found = storm_checks.growth({"a": of_p2pd}, 100.0)
    assert found["thread_growth"] == 1 and found["own_thread_growth"] == 0
    first, last = storm_checks.ce_ends({"a": [_round(n) for n in range(20)]})
    assert first > last


def test_what_a_host_holds_is_told_by_process_and_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = storm_checks.sample(os.getpid(), 1.0)
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            after = storm_checks.sample(os.getpid(), 2.0)
    # Both ends are ours, and both are the same far host.
    assert after.parts["node tcp open"] == before.parts.get("node tcp open", 0) + 2
    assert after.descriptors == before.descriptors + 2
    assert after.peers == before.peers + (1 if not before.peers else 0)
    assert after.threads >= 1 and after.rss_bytes > 1_000_000
    samples = [replace(before, at_s=30.0), replace(after, at_s=90.0)]
    found = storm_checks.held(samples, 100.0)
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
    assert storm_checks.alive([10, 11, 12, 13, 14], tmp_path) == [10, 13]


def test_a_real_process_is_alive_until_it_has_ended() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert storm_checks.alive([child.pid, os.getpid()]) == [child.pid, os.getpid()]
    child.kill()
    assert ends(child.pid, 10.0)
    assert storm_checks.alive([child.pid]) == []  # a zombie: nobody has asked yet
    child.wait()
    assert storm_checks.alive([child.pid]) == []


@pytest.mark.parametrize("hosts", [storm.HOSTS, storm.QUICK_HOSTS])
def test_the_storms_topology_and_run(hosts: tuple[str, ...]) -> None:
    found = topology.parse(storm.topology(hosts).encode())
    assert [h.name for h in found.hosts if h.role == "seed"] == ["seed"]
    assert {h.name for h in found.hosts if h.role == "none"} == {"liar", "new"}
    assert parse(emit(storm.storm_run(50))) == storm.storm_run(50)


def test_logs_of_a_storm_that_failed_are_kept(tmp_path: Path) -> None:
    for name in ("ann-0", "bob-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text(name)
        (tmp_path / name / "weights").write_bytes(bytes(100))
    kept = storm.kept_logs(tmp_path)
    try:
        found = sorted(str(place.relative_to(kept)) for place in kept.rglob("*.*"))
        assert found == ["ann-0/events.jsonl", "bob-0/events.jsonl"]
        assert (kept / "bob-0/events.jsonl").read_text() == "bob-0"
    finally:
        shutil.rmtree(kept)


@pytest.mark.long
def test_five_minutes_of_storm(wan_rights: None) -> None:
    """Takes about seven minutes with the start."""
    figures, rows = storm.run(quick=False)
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
    rounds = int((seconds + 2 * START_S) / storm.PERIOD_S)
    (tmp_path / "run.toml").write_bytes(emit(storm.storm_run(rounds)))
    with Bed(storm.topology(storm.QUICK_HOSTS)) as bed:
        swarm = SwarmOnBed(bed, tmp_path, tmp_path, lambda line: None)
        swarm.start()
        swarm.until_all_train()
        weather = storm.Storm(swarm, lambda line: None)
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
