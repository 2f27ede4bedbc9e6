"""Rounds and densities that follow from a run's length, its hosts and its bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from node.commands.init import init
from protocol.errors import UsageError
from swarm.cost import expected_gb_per_day
from swarm.plan import (
    COVERAGE,
    DRIFT,
    ENOUGH_COVERAGE,
    LEAST_DENSITY,
    LEAST_PERIOD_S,
    MOST_DENSITY,
    REPLICAS,
    plan,
)
from swarm.run import Training
from swarm.run_template import PRESETS, Wishes, preset
from swarm.runfile import RoundSchedule

TRAINING = Training(learning_rate=2e-3, replica_power=0.5)


def test_rounds_are_as_short_as_the_drift_of_replicas_wants_them() -> None:
    assert plan(TRAINING, 1200.0, 2.5).steps_per_round == 10
    half = replace(TRAINING, learning_rate=1e-3)
    assert plan(half, 1200.0, 2.5).steps_per_round == 20
    alike = replace(TRAINING, replica_power=0.0)  # four replicas as slow as one
    assert plan(alike, 1200.0, 2.5).steps_per_round == 20


def test_fast_hosts_make_more_steps_in_rounds_that_cannot_be_shorter() -> None:
    found = plan(TRAINING, 1200.0, 100.0)
    assert (found.period_s, found.steps_per_round) == (LEAST_PERIOD_S, 150)


@given(
    rate=st.floats(1e-6, 1.0),
    duration_s=st.floats(1.0, 1e8),
    steps_per_s=st.floats(1e-3, 1e4),
)
def test_a_plan_is_always_one_that_a_run_file_may_have(
    rate: float, duration_s: float, steps_per_s: float
) -> None:
    found = plan(replace(TRAINING, learning_rate=rate), duration_s, steps_per_s)
    assert LEAST_DENSITY <= found.density <= MOST_DENSITY
    if 1.0 <= found.period_s <= 86400 and found.count <= 10**7:
        RoundSchedule(0, found.period_s, found.count, *found.windows_s)  # refuses what cannot be


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plans(name: str) -> None:
    file = preset(name, name)
    training, rounds = file.run.training, file.rounds
    drift = training.learning_rate * training.rate_factor(REPLICAS) * training.steps_per_round
    assert drift == pytest.approx(DRIFT, rel=0.05)
    assert file.codec.density * rounds.count == pytest.approx(COVERAGE, rel=0.01)


def test_a_budget_makes_updates_sparser_until_it_is_kept() -> None:
    usual = preset("tiny", "x")
    daily = expected_gb_per_day(usual, REPLICAS)
    found = preset("tiny", "x", wishes=Wishes(gb_per_day=daily / 3))
    assert daily / 3.5 < expected_gb_per_day(found, REPLICAS) <= daily / 3
    assert found.codec.density < usual.codec.density
    assert replace(found, exchange=usual.exchange) == usual
    assert preset("tiny", "x", wishes=Wishes(gb_per_day=daily * 2)) == usual


def test_a_budget_that_no_density_keeps_is_refused_with_what_it_would_take() -> None:
    with pytest.raises(UsageError, match="at least") as caught:
        preset("tiny", "x", wishes=Wishes(gb_per_day=0.001))
    assert "--hours" in str(caught.value.hint)


def test_init_plans_a_run_and_says_what_a_small_budget_costs(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    asked = [str(path), "--hours", "2", "--steps-per-s", "5"]
    result = CliRunner().invoke(init, asked)
    assert result.exit_code == 0 and "3600 rounds of 2 s, 2 h in all" in result.output
    assert "warning" not in result.output
    result = CliRunner().invoke(init, [*asked, "--force", "--gb-per-day", "2"])
    assert result.exit_code == 0
    assert f"Below {ENOUGH_COVERAGE:g} the consensus lags behind" in result.output
