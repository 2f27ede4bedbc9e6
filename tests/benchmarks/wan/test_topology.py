"""The emulated WAN's description: what a topology may say, and any bytes that are none."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import ROOT
from benchmarks.wan import topology
from benchmarks.wan.checks import TopologyError
from tests.support.wan_topologies import TWO


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
