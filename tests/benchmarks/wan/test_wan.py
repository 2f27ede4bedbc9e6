"""A real small bed of the emulated WAN. What needs namespaces is skipped where there are none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.harness import ROOT
from benchmarks.wan import namespaces, probe
from benchmarks.wan.bed import Bed
from tests.support.processes import alive, comes_true
from tests.support.wan_topologies import TWO

SWARM = """
[[hosts]]
name = "c"
address = "11.3.0.1"
nat = true
options = ["--relay", "{seed}"]
[[partitions]]
from_s = 40
to_s = 60
apart = ["b"]
[swarm]
seconds = 120
run_file = "run.toml"
"""
WAIT_S = 30.0


@pytest.fixture
def make_bed(wan_rights: None) -> Iterator[Callable[[str], Bed]]:
    beds: list[Bed] = []

    def make(text: str) -> Bed:
        beds.append(Bed(text))
        return beds[-1].__enter__()

    yield make
    for bed in beds:
        bed.__exit__(None, None, None)


def test_hosts_of_a_background_job_hear_ctrl_c_and_who_stays_is_named(
    make_bed: Callable[[str], Bed],
) -> None:
    """A shell starts such jobs with SIGINT ignored: a host that was still starting never left."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        bed = make_bed(TWO)
        code = "import signal; print(signal.getsignal(2) is signal.default_int_handler)"
        hears = bed.start("a", [sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert hears.communicate(timeout=WAIT_S)[0] == b"True\n"
    finally:
        signal.signal(signal.SIGINT, before)
    deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); print(1, flush=True)"
    stays = bed.start(
        "a", [sys.executable, "-c", f"{deaf}; time.sleep(600)"], stdout=subprocess.PIPE
    )
    assert stays.stdout is not None and stays.stdout.readline() == b"1\n"
    stays.stdout.close()
    assert bed.stop_processes(0.2) == [stays.pid]


def test_the_round_trip_is_as_described_and_a_partition_opens_and_heals(
    make_bed: Callable[[str], Bed],
) -> None:
    bed = make_bed(TWO)
    # A loaded machine adds to it and never takes away.
    assert 39.9 <= probe.rtt_ms(bed, "a", "b") < 80
    bed.cut(["b"])
    with pytest.raises(OSError, match="failed"):
        probe.rtt_ms(bed, "a", "b", count=1)
    assert bed.emulated()["a"]["cut"] > 0
    bed.heal()
    bed.set_rtt(120)
    assert 119.9 <= probe.rtt_ms(bed, "a", "b", count=5) < 240
    counts = bed.counters()
    assert counts["a"]["tx_packets"] > 13 and counts["b"]["rx_bytes"] > 0


def test_loss_is_as_described(make_bed: Callable[[str], Bed]) -> None:
    bed = make_bed(TWO + "loss_percent = 10\n")
    share = probe.loss_share(bed, "a", "b", count=1000)
    assert 0.13 < share < 0.25  # 19 % there and back; five standard deviations are 6
    assert bed.emulated()["a"]["lost"] > 0


def test_an_asymmetric_line_carries_its_rates_with_cubic(make_bed: Callable[[str], Bed]) -> None:
    text = TWO.replace("rtt_ms = 40", "rtt_ms = 10") + "up_mbit = 5\ndown_mbit = 20\n"
    bed = make_bed(text)
    up = probe.throughput_mbit(bed, "b", "a", seconds=3)
    down = probe.throughput_mbit(bed, "a", "b", seconds=3)
    assert up["control"] == down["control"] == "cubic"
    # The machine may be too busy for all of it, but no line carries more than its rate.
    assert up["mbit"] > 1 and up["mbit_whole"] < 5
    assert up["mbit_whole"] < down["mbit_whole"] < 20


def test_a_slow_host_has_its_share_of_a_core_while_the_bed_is_up(
    make_bed: Callable[[str], Bed],
) -> None:
    bed = make_bed(TWO + "cpu_percent = 10\n")
    group = namespaces.cpu_group(bed.namespace("b"))
    try:
        sleeper = bed.start("b", ["sleep", "300"])
    except namespaces.NoRights as error:
        pytest.skip(error.message)
    assert str(sleeper.pid) in (group / "cgroup.procs").read_text().split()
    quota = [p for p in (group / "cpu.cfs_quota_us", group / "cpu.max") if p.exists()]
    assert quota[0].read_text().split()[0] == "2000"
    bed.__exit__(None, None, None)
    assert not group.exists()


@pytest.mark.long
def test_100_mbit_are_carried(make_bed: Callable[[str], Bed]) -> None:
    bed = make_bed(TWO.replace("rtt_ms = 40", "rtt_ms = 20"))
    measured = [probe.throughput_mbit(bed, "a", "b", seconds=8) for _ in range(2)]
    assert max(each["mbit"] for each in measured) > 80
    assert max(each["mbit_whole"] for each in measured) < 100


def test_a_host_behind_nat_reaches_others_and_is_not_reached(
    make_bed: Callable[[str], Bed],
) -> None:
    bed = make_bed(TWO + "nat = true\n")
    assert bed.inner_address("b").startswith("192.168.")
    assert probe.rtt_ms(bed, "b", "a", count=3) >= 39.9
    with pytest.raises(OSError, match="failed"):
        probe.rtt_ms(bed, "a", "b", count=1)
    assert bed.emulated()["b"]["nat"] > 0
    assert probe.throughput_mbit(bed, "b", "a", seconds=1)["mbit"] > 0.1


def test_a_process_is_in_its_namespace_as_soon_as_it_is_started(
    make_bed: Callable[[str], Bed],
) -> None:
    """One that enters later is not found by a take-down that comes first, and never ends."""
    bed = make_bed(TWO)
    rooms = {host: Path("/run/netns", bed.namespace(host)).stat().st_ino for host in ("a", "b")}
    outside = Path("/proc/thread-self/ns/net").stat().st_ino
    for host in ("a", "b") * 5:
        child = bed.start(host, ["sleep", "300"])
        assert Path(f"/proc/{child.pid}/ns/net").stat().st_ino == rooms[host]
    assert Path("/proc/thread-self/ns/net").stat().st_ino == outside


def test_a_killed_owner_leaves_nothing(wan_rights: None) -> None:
    """kill -9 of who holds the bed: the forwarder ends its processes and namespaces."""
    code = (
        "import sys, time\n"
        "from benchmarks.wan.bed import Bed\n"
        "bed = Bed(sys.argv[1]).__enter__()\n"
        "child = bed.start('a', ['sleep', '300'])\n"
        "print(bed.namespace('a'), child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    command = [sys.executable, "-c", code, TWO]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name, child = owner.stdout.readline().split()
        assert name in namespaces.ours()
        owner.kill()
    assert comes_true(lambda: name not in namespaces.ours(), WAIT_S)
    assert comes_true(lambda: not alive(int(child)), WAIT_S)


def test_the_next_bed_removes_what_a_crashed_forwarder_left(
    wan_rights: None, make_bed: Callable[[str], Bed]
) -> None:
    """kill -9 of the forwarder too: the next start cleans up, and touches no living bed."""
    crashed = Bed(TWO)
    crashed.__enter__()
    sleeper = crashed.start("a", ["sleep", "300"])
    left = crashed.namespace("a")
    assert crashed._forwarder is not None
    crashed._forwarder.kill()
    crashed._forwarder.wait()
    bed = make_bed(TWO)
    assert left not in namespaces.ours() and bed.namespace("a") in namespaces.ours()
    assert sleeper.wait(WAIT_S) == -signal.SIGKILL
    crashed.__exit__(None, None, None)
    assert bed.namespace("a") in namespaces.ours()


def test_the_command_refuses_a_bad_file_and_skips_without_rights(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[[hosts]]\nname = 1\n")
    program = [sys.executable, "-m", "benchmarks.wan"]
    done = subprocess.run([*program, str(bad)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error:"), done.stderr
    good = tmp_path / "good.toml"
    good.write_text(TWO)
    nowhere = {**os.environ, "PATH": "/nonexistent"}
    done = subprocess.run(
        [*program, str(good)], cwd=ROOT, capture_output=True, text=True, env=nowhere
    )
    assert done.returncode == 77 and "skipped" in done.stderr, done.stderr


@pytest.mark.long
def test_a_swarm_trains_on_the_bed_also_behind_nat_and_through_a_partition(
    wan_rights: None, tmp_path: Path
) -> None:
    from swarm.run_template import emit
    from tests.support.live import tiny_run_file

    run_file = tiny_run_file(blocks=1, period_s=10.0, count=200)
    (tmp_path / "run.toml").write_bytes(emit(run_file))
    described = TWO.replace('name = "a"', 'name = "a"\nrole = "seed"') + SWARM
    (tmp_path / "swarm.toml").write_text(described)
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.wan", str(tmp_path / "swarm.toml")]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    included = {row["host"]: row["included"] for row in result["rows"] if row["kind"] == "worker"}
    assert set(included) == {"a", "b", "c"} and min(included.values()) > 0, included
    for row in result["rows"]:
        if row["kind"] == "host":  # frames are a part of what the kernel sees
            assert 0 < row["ledger_bytes"] < row["kernel_bytes"], row
