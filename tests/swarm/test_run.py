"""The run: what it refuses, by name; its round trip; its schedule."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UsageError
from swarm.run import ModelShape, Noise, Run, Training, usual_learning_rate


def normal_cdf(x: float) -> float:
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


@given(
    blocks=st.integers(1, 64),
    heads=st.sampled_from([1, 2, 4, 8]),
    coupling=st.sampled_from(["independent", "relay", "look_ahead"]),
    objective=st.sampled_from(["bayes", "plain"]),
    sigma_min=st.floats(0.01, 5.0),
    ratio=st.floats(1.1, 100.0),
    seed=st.integers(0, 2**32 - 1),
    staggered=st.booleans(),
)
def test_round_trip_through_json(
    blocks: int,
    heads: int,
    coupling: Any,
    objective: Any,
    sigma_min: float,
    ratio: float,
    seed: int,
    staggered: bool,
) -> None:
    run = Run(
        model=ModelShape(blocks=blocks, heads=heads, width=16 * heads, coupling=coupling),
        noise=Noise(sigma_min=sigma_min, sigma_max=sigma_min * ratio, p_std=3.0),
        training=Training(objective=objective, staggered=staggered),
        seed=seed,
    )
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_edm_round_trip_and_defaults() -> None:
    run = Run(model=ModelShape(coupling="independent"), training=Training(objective="edm"))
    assert Run.from_dict(run.to_dict()) == run
    assert Run.from_dict({}) == Run()
    assert Run.from_dict({"noise": {"sigma_max": 20}}).noise.sigma_max == 20.0


BAD_RUNS: list[tuple[dict[Any, Any], str]] = [
    ({"colour": 1}, "colour"),
    ({"model": {"depth": 3}}, "depth"),
    ({"model": {"relays": True}}, "relays"),  # a property, not a field
    ({"noise": {"probability": 0.5}}, "probability"),  # a method
    ({"model": {"__doc__": "x"}}, "__doc__"),
    ({"model": {7: 3}}, "7"),
    ({"model": 3}, "model"),
    ({"model": None}, "model"),
    ({"training": []}, "training"),
    ({"model": {"blocks": "4"}}, "blocks"),
    ({"model": {"blocks": 4.0}}, "blocks"),
    ({"model": {"blocks": True}}, "blocks"),
    ({"model": {"blocks": 0}}, "blocks"),
    ({"model": {"blocks": -1}}, "blocks"),
    ({"model": {"blocks": 10**9}}, "blocks"),
    ({"model": {"layers": 0}}, "layers"),
    ({"model": {"width": 10**9}}, "width"),
    ({"model": {"context": 1}}, "context"),
    ({"model": {"heads": 3}}, "heads"),
    ({"model": {"width": 12, "heads": 4}}, "heads"),  # odd head size: no rotary pairs
    ({"model": {"coupling": "telepathy"}}, "coupling"),
    ({"model": {"coupling": 3}}, "coupling"),
    ({"noise": {"sigma_min": 10.0, "sigma_max": 5.0}}, "sigma_min"),
    ({"noise": {"sigma_min": 5.0, "sigma_max": 5.0}}, "sigma_min"),
    ({"noise": {"sigma_min": 0.0}}, "sigma_min"),
    ({"noise": {"sigma_min": -1.0}}, "sigma_min"),
    ({"noise": {"sigma_min": math.nan}}, "sigma_min"),
    ({"noise": {"sigma_max": math.inf}}, "sigma_max"),
    ({"noise": {"sigma_max": 10**400}}, "sigma_max"),  # an integer that no float can hold
    ({"noise": {"sigma_max": True}}, "sigma_max"),
    ({"noise": {"p_std": 0.0}}, "p_std"),
    ({"noise": {"p_mean": math.nan}}, "p_mean"),
    ({"noise": {"overlap": 2.0}}, "overlap"),
    ({"noise": {"leak_limit_nats": 0.0}}, "leak_limit_nats"),
    ({"noise": {"sigma_min": 1e6, "sigma_max": 2e6}}, "probability"),
    ({"training": {"objective": "gan"}}, "objective"),
    ({"training": {"steps": 0}}, "steps"),
    ({"training": {"steps": 1.5}}, "steps"),
    ({"training": {"steps_per_round": 0}}, "steps_per_round"),
    ({"training": {"batch": 0}}, "batch"),
    ({"training": {"learning_rate": 0.0}}, "learning_rate"),
    ({"training": {"learning_rate": math.nan}}, "learning_rate"),
    ({"training": {"weight_decay": 5.0}}, "weight_decay"),
    ({"training": {"beta1": 1.0}}, "beta1"),
    ({"training": {"beta2": -0.5}}, "beta2"),
    ({"training": {"look_ahead_weight": -1.0}}, "look_ahead_weight"),
    ({"training": {"staggered": "yes"}}, "staggered"),
    ({"training": {"objective": "edm"}}, "edm"),  # with the default coupling, look_ahead
    ({"training": {"objective": "edm"}, "model": {"coupling": "relay"}}, "edm"),
    ({"seed": True}, "seed"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**32}, "seed"),  # torch would read it as 0
    ({"seed": "0"}, "seed"),
]


@pytest.mark.parametrize(("raw", "named"), BAD_RUNS, ids=[str(raw)[:60] for raw, _ in BAD_RUNS])
def test_refusal_names_the_field(raw: dict[Any, Any], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        Run.from_dict(raw)
    assert named in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("raw", [None, [], "run", 3])
def test_a_run_that_is_no_table_is_refused(raw: Any) -> None:
    with pytest.raises(UsageError):
        Run.from_dict(raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["model", "noise", "training", "seed", "blocks", "sigma_min", "steps"]
                )
                | st.text(max_size=5),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_whatever_a_stranger_writes_is_a_run_or_a_usage_error(raw: Any) -> None:
    with contextlib.suppress(UsageError):
        assert isinstance(Run.from_dict(raw), Run)


def test_the_hint_for_heads_is_a_width_that_works() -> None:
    with pytest.raises(UsageError) as refused:
        ModelShape(width=100, heads=8)
    multiple = int(refused.value.hint.split()[-1])
    assert ModelShape(width=7 * multiple, heads=8).width == 7 * multiple


@given(sigma=st.floats(1e-3, 1e3), p_mean=st.floats(-2.0, 2.0), p_std=st.floats(0.8, 3.0))
def test_lognormal_cdf_and_its_inverse(sigma: float, p_mean: float, p_std: float) -> None:
    noise = Noise(p_mean=p_mean, p_std=p_std)
    expected = normal_cdf((math.log(sigma) - p_mean) / p_std)
    assert noise.probability(sigma) == pytest.approx(expected, abs=1e-12)
    if 1e-6 < expected < 1 - 1e-6:
        assert noise.quantile(expected) == pytest.approx(sigma, rel=1e-6)


def test_median_of_the_lognormal() -> None:
    noise = Noise(p_mean=-1.2)
    assert noise.quantile(0.5) == pytest.approx(math.exp(-1.2))
    assert noise.probability(math.exp(-1.2 + 1.2)) == pytest.approx(0.841344746, abs=1e-8)


def test_learning_rate_warms_up_then_follows_a_cosine() -> None:
    training = Training(steps=1000, warmup_steps=10, learning_rate=2.0, final_learning_rate=0.1)
    assert training.learning_rate_at(0) == pytest.approx(0.2, rel=1e-3)
    assert training.learning_rate_at(4) == pytest.approx(1.0, rel=1e-3)
    # Half-way the cosine is half-way between the peak and the floor.
    assert training.learning_rate_at(500) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    quarter = 2.0 * (0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5)))
    assert training.learning_rate_at(250) == pytest.approx(quarter)
    assert training.learning_rate_at(1000) == pytest.approx(0.2)
    assert training.learning_rate_at(5000) == pytest.approx(0.2)  # a step beyond the end


def test_the_usual_learning_rate_falls_once_and_is_the_defaults() -> None:
    assert usual_learning_rate(1) == usual_learning_rate(5999) > usual_learning_rate(6000) > 0
    assert Training().learning_rate == usual_learning_rate(Training().steps)


def test_learning_rate_without_warm_up_starts_at_the_peak() -> None:
    assert Training(warmup_steps=0, learning_rate=0.5).learning_rate_at(0) == pytest.approx(0.5)


@given(steps=st.integers(1, 5000), warmup=st.integers(0, 200), floor=st.floats(0.0, 1.0))
def test_learning_rate_stays_within_its_bounds_and_falls(
    steps: int, warmup: int, floor: float
) -> None:
    training = Training(
        steps=steps, warmup_steps=warmup, learning_rate=1.0, final_learning_rate=floor
    )
    rates = [training.learning_rate_at(s) for s in range(0, steps + 1, max(1, steps // 50))]
    assert all(0.0 <= rate <= 1.0 + 1e-12 for rate in rates)
    after = [training.learning_rate_at(s) for s in range(warmup, steps + 1, max(1, steps // 50))]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
