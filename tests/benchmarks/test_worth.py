"""What a further host is worth: the rows that are compared, and the figures that follow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.worth import Row, bytes_needed, figures, table


def row(kind: str, hosts: int, ce: float, **more: Any) -> dict[str, Any]:
    values = {
        "preset": "tiny",
        "seed": 0,
        "blocks": 1,
        "slow": 0,
        "longer": 1,
        "kind": kind,
        "hosts": hosts,
        "learning_rate": 0.002,
        "ce": ce,
        "ce_not_fitted": ce,
        "ce_own": ce - 0.002,
        "everything_mb": 1000.0 if kind.startswith("dense") else 20.0,
        "bytes_seen": 3e6 * (hosts if "swarm" in kind else 1),
    }
    return {**values, **more}


ROWS = [
    row("alone", 1, 1.40),
    row("alone", 1, 1.36, learning_rate=0.001),
    row("alone", 1, 1.30, longer=2, bytes_seen=6e6),
    row("alone", 1, 1.24, longer=4, bytes_seen=12e6),
    row("cluster", 4, 1.30, learning_rate=0.002),
    row("cluster", 4, 1.26, learning_rate=0.004),
    row("swarm", 4, 1.27),
    row("dense swarm", 4, 1.265),
    row("swarm", 4, 1.272, slow=1),
    row("swarm", 1, 1.39, slow=1),
]


def test_each_is_compared_at_its_best_learning_rate() -> None:
    found = figures(ROWS)
    assert found["gain_kept_4"] == pytest.approx((1.36 - 1.27) / (1.36 - 1.26))
    assert found["gain_kept_dense_4"] == pytest.approx((1.36 - 1.265) / (1.36 - 1.26))
    assert found["worst_ce_over_alone"] == pytest.approx(1.27 - 1.36)
    assert found["bytes_ratio_dense"] == 50
    assert found["consensus_lag_nats"] == pytest.approx(0.002)


def test_a_slow_host_is_compared_with_the_same_hosts_without_it() -> None:
    assert figures(ROWS)["worst_ce_of_a_slow_host"] == pytest.approx(0.002)  # not 1.39 - 1.36


def test_efficiency_is_read_from_the_curve_of_one_host() -> None:
    curve = [(3e6, 1.36), (6e6, 1.30), (12e6, 1.24)]
    assert bytes_needed(curve, 1.30) == pytest.approx(6e6)
    halfway = bytes_needed(curve, 1.27)
    assert halfway == pytest.approx(6e6 * 2**0.5)
    assert bytes_needed(curve, 1.2) is None and bytes_needed(curve, 1.5) is None
    assert figures(ROWS)["efficiency_4"] == pytest.approx(6e6 * 2**0.5 / 12e6)


def test_figures_of_an_unfinished_table() -> None:
    assert figures([]) == {}
    assert figures(ROWS[:1]) == {"ce_alone": 1.40}
    assert "gain_kept_4" not in figures([ROWS[0], ROWS[6]])


@pytest.mark.parametrize("quick", [True, False])
def test_rows_have_names_and_keys_of_their_own(quick: bool) -> None:
    rows = table(quick)
    assert len({r.name for r in rows}) == len({r.key for r in rows}) == len(rows)
    assert all(json.loads(r.key) for r in rows)


def test_what_is_measured_is_the_preset() -> None:
    """All of its rounds, its codec and its learning rates; a cluster has the batches of many."""
    swarm, cluster, dense = Row("swarm", 4), Row("cluster", 4, rate=2.0), Row("dense swarm", 4)
    file = swarm.file
    assert swarm.rounds == file.rounds.count and swarm.run.training.steps >= 3000
    assert swarm.codecs == file.codecs and swarm.replicas == (4,)
    assert swarm.run.training.replica_power == file.run.training.replica_power > 0
    assert cluster.replicas == (1,) and cluster.run.training.batch == 4 * file.run.training.batch
    assert cluster.run.training.learning_rate == 2 * file.run.training.learning_rate
    assert cluster.run.training.replica_power == 0
    assert not dense.codecs.sparse and dense.run == swarm.run
    assert Row("swarm", 2, blocks=4).run.model.relays
