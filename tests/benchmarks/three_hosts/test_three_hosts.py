"""The public-network experiments: their rows, topologies and figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.three_hosts import rows as three_hosts
from benchmarks.three_hosts.swarm import SPARSE, expected_bytes, start_ce
from benchmarks.wan import topology
from node.data.corpus import load_corpus
from swarm.run_template import emit
from swarm.runfile import parse


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


def test_the_documented_overhead_of_large_and_of_small_frames() -> None:
    assert 1.03 < expected_bytes(10**8, 100, 0) / 1e8 < 1.07
    assert expected_bytes(1000, 10, 0) > 1000 + 10 * 52
    assert expected_bytes(0, 0, 77) == 77
