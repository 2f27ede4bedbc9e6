"""The swarm without a network, on a toy model: what it exchanges is what a live node would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import attacks, lateness, wire_bytes
from benchmarks.exchange import BlockGroup, Diverged, ExchangeRules, ExchangeSwarm
from benchmarks.exchange_rows import run_of
from benchmarks.gb_per_nat import rows as gb_per_nat
from node.data.windows import WindowStream, stream_seed
from protocol.limits import DIGEST_BYTES
from protocol.messages import AnnounceReply
from swarm.consensus.feedback import Unsent
from swarm.learning.coupling import upstream_versions
from swarm.learning.flat import flat_weights
from swarm.run import ModelShape

TEXT = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
TINY = ModelShape(3, 1, 16, 2, 16)
TOPK = "topk:0.05:2:overall"


def swarm_of(
    rules: ExchangeRules, replicas: tuple[int, ...] = (1, 2, 1), rounds: int = 6
) -> ExchangeSwarm:
    return ExchangeSwarm(run_of(rounds, 2, shape=TINY), replicas, TEXT, rules)


def trained(swarm: ExchangeSwarm, rounds: int) -> ExchangeSwarm:
    for _ in range(rounds):
        swarm.one_round()
    swarm.settle()
    return swarm


def rest_of(group: BlockGroup, number: int) -> np.ndarray:
    member = group.members[number]
    flying = [sent.own for sent in member.in_flight]
    rest = Unsent(flat_weights(member.worker.block), group.consensus, flying, member.aside)
    return np.rint(rest.dense() * 2.0**24).astype(np.int64)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_nothing_is_lost_and_nothing_counted_twice(participation: float) -> None:
    """Uncompressed and alone, all that was learnt is in the consensus once its update got through.

    No step is done during the exchange, so that nothing new can be unsent.
    """
    swarm = swarm_of(ExchangeRules("fp32", participation, overlap=0.0), (1, 1, 1))
    for _ in range(8):
        swarm.one_round()
        got_through = [bool(group.members[0].in_flight) for group in swarm.groups]
        swarm.settle()
        for group, through in zip(swarm.groups, got_through, strict=True):
            if through:
                assert np.abs(rest_of(group, 0)).max() <= 2  # quanta: fp32's own rounding


def test_late_updates_are_in_flight_for_as_long() -> None:
    swarm = trained(swarm_of(ExchangeRules(TOPK, late_rounds=2)), 5)
    for group in swarm.groups:
        assert [sent.round for sent in group.members[0].in_flight] == [4, 5]
        assert len(group.changes) == 3


def test_copies_are_the_versions_that_a_live_worker_reads() -> None:
    swarm = trained(swarm_of(ExchangeRules(TOPK)), 5)
    swarm._train(0, 0)  # no step: they only see what there is
    wanted = dict(enumerate(upstream_versions(2, 5, staggered=True)))
    for copies in swarm._copies[2]:
        assert set(copies) == {0, 1}  # and there is nobody to look ahead to
        for block, moving in copies.items():
            moving.part = 1.0  # the rest of the way
            expected = swarm.groups[block].versions[wanted[block]]
            moving.move()
            with moving.at_hand() as block:
                assert np.array_equal(flat_weights(block), expected)
    assert set(swarm._copies[0][0]) == {1}
    assert all(len(group.versions) <= TINY.blocks + 2 for group in swarm.groups)


def test_a_slow_worker_makes_fewer_steps() -> None:
    swarm = swarm_of(ExchangeRules(TOPK))
    swarm.groups[1].members[1].speed = 0.25
    trained(swarm, 6)
    assert [member.position for member in swarm.groups[1].members] == [12, 3]


def test_hosts_with_other_texts_all_count() -> None:
    """Three with prose and one with code: what one learns alone is no lie."""
    prose = np.frombuffer(b"The cat sat on the mat, and looked at the moon. " * 400, np.uint8)
    code = np.frombuffer(b"def f(x):\n    return [i ** 2 for i in range(x)]\n" * 400, np.uint8)
    swarm = ExchangeSwarm(
        run_of(60, 4, shape=ModelShape(1, 1, 32, 2, 32, "independent")),
        (4,),
        prose,
        ExchangeRules("topk:0.2:2:overall"),
    )
    other = swarm.groups[0].members[3]
    other.stream = WindowStream(code, 32, 8, stream_seed("windows", 0, 0, 3))
    trained(swarm, 60)
    assert [member.left_out for member in swarm.groups[0].members] == [0, 0, 0, 0]


def test_bytes_by_purpose() -> None:
    swarm = swarm_of(ExchangeRules(TOPK))
    assert swarm._followers == [3, 2, 2]  # blocks 1 and 2 read block 0, 0 and 2 read block 1, ...
    swarm.one_round()
    lengths = [len(m.in_flight[0].payload) for m in swarm.groups[1].members]
    assert swarm.moved.update == sum(map(wire_bytes.pull_bytes, lengths))
    assert (swarm.moved.relay, swarm.moved.control) == (0, 0)
    swarm.settle()
    assert swarm.moved.relay > 2 * sum(lengths)
    assert swarm.moved.everything == swarm.moved.update + swarm.moved.relay + swarm.moved.control


def test_frames_are_counted_whole() -> None:
    empty = wire_bytes.frame_bytes(AnnounceReply(count=1))
    assert wire_bytes.frame_bytes(AnnounceReply(count=1), 1000) == empty + 1000 + DIGEST_BYTES
    assert 0 < wire_bytes.pull_bytes(1000) - 1000 < 500
    one, two = wire_bytes.follow_bytes([500], 1, 1), wire_bytes.follow_bytes([500, 500], 2, 2)
    assert one + 500 < two
    assert wire_bytes.control_bytes(1) < wire_bytes.control_bytes(2) < wire_bytes.control_bytes(4)


def test_lies_that_are_refused_change_nothing() -> None:
    rounds = 9
    honest = trained(swarm_of(ExchangeRules(TOPK), (1, 3, 1), rounds), rounds)
    lied = swarm_of(ExchangeRules(TOPK), (1, 4, 1), rounds)
    liar = lied.groups[attacks.ATTACKED].members[-1]
    liar.lie = attacks.Liar(attacks.REFUSED, lied)
    trained(lied, rounds)
    assert liar.refused == rounds
    for one, other in zip(honest.groups, lied.groups, strict=True):
        assert np.array_equal(one.consensus, other.consensus)


@pytest.mark.parametrize("lie", attacks.LIES)
def test_other_lies_are_well_formed(lie: str) -> None:
    swarm = swarm_of(ExchangeRules(TOPK), (1, 4, 1), 3)
    liar = swarm.groups[attacks.ATTACKED].members[-1]
    liar.lie = attacks.Liar(lie, swarm)
    assert trained(swarm, 3).settled == 3
    assert liar.refused == 0


def test_plain_averaging_takes_what_the_checks_refuse() -> None:
    rules = ExchangeRules(TOPK, plain=True, read=attacks.unchecked)
    swarm = swarm_of(rules, (1, 4, 1), 3)
    liar = swarm.groups[attacks.ATTACKED].members[-1]
    liar.lie = attacks.Liar("other block", swarm)
    trained(swarm, 2)
    assert (liar.refused, liar.left_out) == (0, 0)
    liar.lie = attacks.Liar("NaN", swarm)
    with pytest.raises(Diverged):
        trained(swarm, 1)


def test_figures_of_attacks_and_lateness() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "without the liar", "ce": 2.0},
        {"name": "our rule, sign flip", "ce": 2.01},
        {"name": "our rule, 4 honest", "ce": 2.5},
        {"name": "plain, sign flip", "ce": 3.0},
    ]
    found = attacks.figures(rows)
    assert found["worst_ce_gap"] == pytest.approx(0.01)
    assert found["worst_ce_gap_plain"] == pytest.approx(1.0)
    assert lateness.figures([{"name": "1 round late", "ce": 2.0}]) == {"ce_1_late": 2.0}


def test_a_row_is_measured_again_when_its_size_changes() -> None:
    for module in (attacks, lateness, gb_per_nat):
        keys = [v.key for quick in (True, False) for v in module.variants(quick)]
        assert len(set(keys)) == len(keys)
