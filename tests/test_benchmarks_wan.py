"""The emulated WAN: what a topology may say, the arithmetic of links, NAT, and a real small bed.

What needs namespaces is skipped where the machine allows none.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from benchmarks.wan import namespaces, probe, topology  # noqa: E402
from benchmarks.wan.bed import Bed  # noqa: E402
from benchmarks.wan.checks import TopologyError  # noqa: E402
from benchmarks.wan.links import Line, Wan, Way  # noqa: E402
from benchmarks.wan.nat import IDLE_S, TCP, UDP, Nat  # noqa: E402

TWO = """
[wan]
rtt_ms = 40
[[hosts]]
name = "a"
address = "11.1.0.1"
[[hosts]]
name = "b"
address = "11.2.0.1"
"""
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


# --- the file -------------------------------------------------------------------------------------


def test_a_topology_says_what_it_says_and_defaults_hold() -> None:
    text = """
    name = "n"
    [wan]
    rtt_ms = 80
    down_mbit = 50
    mtu = 1400
    [[hosts]]
    name = "a"
    address = "11.1.0.1"
    up_mbit = 10
    role = "seed"
    [[hosts]]
    name = "b"
    address = "11.2.0.1"
    nat = true
    workers = 2
    options = ["--relay", "{seed}"]
    [[paths]]
    between = ["b", "a"]
    loss_percent = 1
    [[partitions]]
    from_s = 5
    to_s = 9
    apart = ["b"]
    [swarm]
    seconds = 30
    """
    found = topology.parse(text.encode())
    a, b = found.hosts
    assert (a.link.up_mbit, a.link.down_mbit, a.link.queue_ms) == (10, 50, 200)
    assert (b.link.up_mbit, b.nat, b.workers, b.options) == (100, True, 2, ("--relay", "{seed}"))
    assert found.between("a", "b") == found.between("b", "a")
    assert (found.between("a", "b").rtt_ms, found.between("a", "b").loss_percent) == (80, 1)
    assert found.mtu == 1400 and found.swarm.seconds == 30
    assert found.partitions[0].apart == ("b",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('address = "11.1.0.1"', "address"),  # twice
        ('address = "localhost"', "IPv4"),
        ('address = "127.0.0.1"', "IPv4"),
        ('address = "224.0.0.1"', "IPv4"),
        ("address = 5", "text"),
        ('address = "11.2.0.1"\nup_mbit = 0', "up_mbit"),
        ('address = "11.2.0.1"\nup_mbit = nan', "up_mbit"),
        ('address = "11.2.0.1"\nup_mbit = "10"', "number"),
        ('address = "11.2.0.1"\nloss_percent = 100', "loss_percent"),
        ('address = "11.2.0.1"\nspeed = 3', "speed"),
        ('address = "11.2.0.1"\nlink = 3', "link"),
        ('address = "11.2.0.1"\nrole = "king"', "role"),
        ('address = "11.2.0.1"\nworkers = 2.5', "workers"),
        ('address = "11.2.0.1"\noptions = "--verbose"', "options"),
        ('address = "11.2.0.1"\n[[paths]]\nbetween = ["a"]', "between"),
        ('address = "11.2.0.1"\n[[paths]]\nbetween = ["a", "z"]', "z"),
        ('address = "11.2.0.1"\n[[paths]]\nbetween = ["a", "a"]', "twice"),
        ('address = "11.2.0.1"\n[[partitions]]\nfrom_s=9\nto_s=5\napart=["a"]', "partition"),
        ('address = "11.2.0.1"\n[[partitions]]\nfrom_s=9\napart=["a"]', "to_s"),
        ('address = "11.2.0.1"\n[paths]\nx = 1', "paths"),
        ("", "address"),
        ("=", "TOML"),
    ],
)
def test_mistakes_are_refused_by_name(change: str, words: str) -> None:
    text = TWO.replace('address = "11.2.0.1"', change)
    with pytest.raises(TopologyError) as caught:
        topology.parse(text.encode())
    assert words in f"{caught.value.message} {caught.value.hint}"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_topology_or_an_error_of_ours(data: bytes) -> None:
    with suppress(TopologyError):
        topology.parse(data)


@given(
    st.sampled_from(
        ["name", "address", "up_mbit", "nat", "role", "workers", "options", "queue_ms"]
    ),
    st.one_of(
        st.integers(-5, 2**70),
        st.booleans(),
        st.text(st.characters(codec="ascii", exclude_characters='"\\\n\r'), max_size=20),
    ),
)
def test_any_value_of_a_field_is_taken_or_refused(field: str, value: object) -> None:
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
    host = {"name": '"b"', "address": '"11.2.0.1"', field: shown}
    text = TWO.rpartition("[[hosts]]")[0] + "[[hosts]]\n"
    text += "\n".join(f"{key} = {written}" for key, written in host.items())
    with suppress(TopologyError):
        topology.parse(text.encode())


def test_the_examples_are_topologies() -> None:
    examples = sorted((ROOT / "benchmarks" / "wan").glob("*.toml"))
    assert examples
    for path in examples:
        assert topology.load(path).hosts


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(TopologyError):
        topology.load(ROOT / "nothing.toml")


# --- links ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(40, 1500), st.floats(0, 0.01)), max_size=100))
def test_a_line_is_never_faster_than_its_rate_nor_its_queue_longer(
    packets: list[tuple[int, float]],
) -> None:
    line = Line(mbit=8, queue_ms=10)  # 1e6 bytes a second
    now_s, last_s, accepted = 1.0, 1.0, 0
    for size, gap_s in packets:
        now_s += gap_s
        through_s = line.through_s(size, now_s)
        if through_s is None:
            continue
        accepted += size
        assert through_s >= last_s + size / 1e6 - 1e-9
        assert through_s - now_s <= 0.010 + size / 1e6 + 1e-9
        last_s = through_s
    assert accepted <= (last_s - 1.0) * 1e6 + 1e-3


@given(st.lists(st.tuples(st.floats(0, 0.01), st.floats(0, 1)), max_size=50))
def test_packets_of_a_way_keep_their_order(steps: list[tuple[float, float]]) -> None:
    way = Way(delay_s=0.02, jitter_s=0.05, loss=0.0)
    now_s, last_s = 0.0, 0.0
    for gap_s, luck in steps:
        now_s += gap_s
        arrival_s = way.arrives_s(now_s, luck)
        assert arrival_s >= max(last_s, now_s + 0.02 - 1e-12)
        last_s = arrival_s


def test_a_partition_is_between_the_sides_only_and_heals() -> None:
    hosts = "".join(f'[[hosts]]\nname = "h{i}"\naddress = "11.{i}.0.1"\n' for i in range(1, 5))
    wan = Wan(topology.parse(hosts.encode()), Random(0))
    wan.cut([0, 1])
    cut = {(i, j) for i in range(4) for j in range(4) if wan.ways[i][j].cut}
    assert cut == {(i, j) for i in range(4) for j in range(4) if (i < 2) != (j < 2)}
    wan.heal()
    assert not any(way.cut for row in wan.ways for way in row)


# --- NAT ------------------------------------------------------------------------------------------


def _packet(
    protocol: int, source: str, sport: int, to: str, port: int, data: bytes = b"x"
) -> bytes:
    addresses = socket.inet_aton(source) + socket.inet_aton(to)
    if protocol == TCP:
        body = struct.pack("!HHIIHHHH", sport, port, 1, 2, 0x5010, 100, 0, 0) + data
        at = 16
    else:
        body = struct.pack("!HHHH", sport, port, 8 + len(data), 0) + data
        at = 6
    pseudo = addresses + struct.pack("!HH", protocol, len(body))
    body = body[:at] + struct.pack("!H", _checksum(pseudo + body) or 0xFFFF) + body[at + 2 :]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 7, 0x4000, 64, protocol, 0) + addresses
    return head[:10] + struct.pack("!H", _checksum(head)) + head[12:] + body


def _checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _intact(packet: bytes) -> bool:
    pseudo = packet[12:20] + struct.pack("!HH", packet[9], len(packet) - 20)
    return _checksum(packet[:20]) == 0 and _checksum(pseudo + packet[20:]) in (0, 0xFFFF)


PORTS = st.integers(1, 65535)


@given(st.sampled_from([TCP, UDP]), PORTS, PORTS, st.binary(max_size=40))
def test_a_conversation_through_nat_keeps_checksums_and_finds_back(
    protocol: int, sport: int, port: int, data: bytes
) -> None:
    nat = Nat(socket.inet_aton("11.9.0.1"))
    out = nat.outward(_packet(protocol, "192.168.1.2", sport, "11.1.0.1", port, data), 1.0)
    assert out is not None and _intact(out)
    assert socket.inet_ntoa(out[12:16]) == "11.9.0.1"
    mapped = struct.unpack_from("!H", out, 20)[0]
    back = nat.inward(_packet(protocol, "11.1.0.1", port, "11.9.0.1", mapped, data), 2.0)
    assert back is not None and _intact(back)
    assert socket.inet_ntoa(back[16:20]) == "192.168.1.2"
    assert struct.unpack_from("!H", back, 22)[0] == sport


def test_strangers_do_not_come_through_nat_and_mappings_end() -> None:
    nat = Nat(socket.inet_aton("11.9.0.1"))
    out = nat.outward(_packet(UDP, "192.168.1.2", 5, "11.1.0.1", 7), 0.0)
    again = nat.outward(_packet(UDP, "192.168.1.2", 5, "11.2.0.1", 8), 0.0)
    assert out is not None and again is not None
    mapped = struct.unpack_from("!H", out, 20)[0]
    assert mapped == struct.unpack_from("!H", again, 20)[0]  # one mapping for all
    for address, port in (("11.1.0.1", 9), ("11.3.0.1", 7)):
        assert nat.inward(_packet(UDP, address, port, "11.9.0.1", mapped), 1.0) is None
    assert nat.inward(_packet(TCP, "11.1.0.1", 7, "11.9.0.1", mapped), 1.0) is None
    assert nat.inward(_packet(UDP, "11.1.0.1", 7, "11.9.0.1", mapped), 1.0) is not None
    assert nat.inward(_packet(UDP, "11.1.0.1", 7, "11.9.0.1", mapped), 2 + IDLE_S) is None
    icmp = _packet(UDP, "192.168.1.2", 5, "11.1.0.1", 7)
    assert nat.outward(icmp[:9] + b"\x01" + icmp[10:], 0.0) is None


@given(st.binary(min_size=20, max_size=60))
def test_nat_takes_any_bytes(packet: bytes) -> None:
    nat = Nat(b"\x0b\x09\x00\x01")
    nat.outward(packet, 0.0)
    nat.inward(packet, 0.0)


# --- a real bed -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rights() -> None:
    try:
        namespaces.check_rights()
    except namespaces.NoRights as error:
        pytest.skip(f"{error.message}: {error.hint}")


@pytest.fixture
def make_bed(rights: None) -> Iterator[Callable[[str], Bed]]:
    beds: list[Bed] = []

    def make(text: str) -> Bed:
        beds.append(Bed(text))
        return beds[-1].__enter__()

    yield make
    for bed in beds:
        bed.__exit__(None, None, None)


def _until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "it took too long"
        time.sleep(0.02)


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


def test_a_killed_owner_leaves_nothing(rights: None) -> None:
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
    _until(lambda: name not in namespaces.ours())
    _until(lambda: not _alive(int(child)))


def test_the_next_bed_removes_what_a_crashed_forwarder_left(
    rights: None, make_bed: Callable[[str], Bed]
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
    rights: None, tmp_path: Path
) -> None:
    from live import tiny_run_file

    from node.cli_operator import emit

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


def _alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
