"""Noise: equal probability, the truncated lognormal, frozen targets, and what a sigma leaks."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LeakError
from swarm.learning.noise import (
    Interval,
    block_interval,
    draw_sigma,
    leak_nats,
    refuse_leak,
    sigma_edges,
    target_table,
)
from swarm.run import Noise


def lognormal_cdf(noise: Noise, sigma: float) -> float:
    """Written anew, with erf, so that a wrong formula in `Noise` cannot hide."""
    return 0.5 * (1 + math.erf((math.log(sigma) - noise.p_mean) / (noise.p_std * math.sqrt(2))))


noises = st.builds(
    lambda low, ratio, mean, std, overlap: Noise(
        sigma_min=low, sigma_max=low * ratio, p_mean=mean, p_std=std, overlap=overlap
    ),
    st.floats(0.1, 5.0),
    st.floats(1.2, 50.0),
    st.floats(-1.5, 1.5),
    st.floats(1.0, 3.0),
    st.floats(0.0, 0.5),
)


@given(noises, st.integers(1, 16))
def test_every_block_has_the_same_probability(noise: Noise, blocks: int) -> None:
    edges = sigma_edges(noise, blocks)
    assert len(edges) == blocks + 1
    assert edges[0] == noise.sigma_max and edges[-1] == noise.sigma_min
    assert all(a > b for a, b in itertools.pairwise(edges))
    at = [lognormal_cdf(noise, sigma) for sigma in edges]
    share = (at[0] - at[-1]) / blocks
    for above, below in itertools.pairwise(at):
        assert above - below == pytest.approx(share, rel=1e-6, abs=1e-9)


@given(noises, st.integers(1, 16))
def test_intervals_overlap_by_a_share_of_their_log_width(noise: Noise, blocks: int) -> None:
    edges = sigma_edges(noise, blocks)
    intervals = [block_interval(noise, blocks, block) for block in range(blocks)]
    for block, interval in enumerate(intervals):
        high, low = edges[block], edges[block + 1]
        reach = noise.overlap * math.log(high / low)
        assert noise.sigma_min <= interval.low < interval.high <= noise.sigma_max
        if block > 0:
            wanted = min(math.log(high) + reach, math.log(noise.sigma_max))
            assert math.log(interval.high) == pytest.approx(wanted, abs=1e-9)
        if block < blocks - 1:
            wanted = max(math.log(low) - reach, math.log(noise.sigma_min))
            assert math.log(interval.low) == pytest.approx(wanted, abs=1e-9)
    assert intervals[0].high == noise.sigma_max and intervals[-1].low == noise.sigma_min
    for above, below in itertools.pairwise(intervals):
        assert below.high >= above.low * (1 - 1e-12)  # no gap between neighbours


def test_without_overlap_the_intervals_are_the_edges() -> None:
    noise = Noise(overlap=0.0)
    edges = sigma_edges(noise, 4)
    for block in range(4):
        assert block_interval(noise, 4, block) == Interval(edges[block + 1], edges[block])


@pytest.mark.parametrize(
    ("noise", "interval"),
    [
        (Noise(), Interval(5.0, 10.0)),
        (Noise(sigma_min=0.002, sigma_max=80.0), Interval(0.002, 80.0)),
        (Noise(sigma_min=0.1, sigma_max=10.0, p_mean=0.3, p_std=0.7), Interval(0.5, 2.0)),
    ],
)
def test_drawn_sigmas_follow_the_truncated_lognormal(noise: Noise, interval: Interval) -> None:
    count = 20_000
    drawn = draw_sigma(noise, interval, count, torch.Generator().manual_seed(3)).double()
    low, high = lognormal_cdf(noise, interval.low), lognormal_cdf(noise, interval.high)
    cdf = np.array([(lognormal_cdf(noise, s) - low) / (high - low) for s in drawn.sort().values])
    steps = np.arange(1, count + 1) / count
    distance = max(np.abs(cdf - steps).max(), np.abs(cdf - steps + 1 / count).max())
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov at 0.1 %
    assert float(drawn.min()) >= interval.low * (1 - 1e-6)
    assert float(drawn.max()) <= interval.high * (1 + 1e-6)
    # The test has power: sigmas uniform in the interval would not pass it.
    uniform = np.linspace(0, 1, count) * (interval.high - interval.low) + interval.low
    other = np.array([(lognormal_cdf(noise, s) - low) / (high - low) for s in uniform])
    assert np.abs(other - steps).max() > 1.95 / math.sqrt(count)


def test_drawn_sigmas_are_a_function_of_the_generator() -> None:
    noise, interval = Noise(), Interval(5.0, 10.0)
    first, again, other = (
        draw_sigma(noise, interval, 8, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("width", [8, 128])
def test_targets_have_unit_norm_and_are_always_the_same(width: int) -> None:
    table = target_table(7, width)
    assert table.shape == (256, width) and table.dtype == torch.float32
    assert torch.allclose(table.double().norm(dim=1), torch.ones(256).double(), atol=1e-6)
    torch.manual_seed(123)  # the caller's generator neither matters nor moves
    before = torch.random.get_rng_state()
    assert torch.equal(target_table(7, width), table)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.allclose(target_table(8, width), table, atol=0.1)
    # Directions are spread: no two bytes share a target.
    cosines = table @ table.T - torch.eye(256)
    assert float(cosines.max()) < 0.999


def test_targets_are_pinned() -> None:
    """Every host of a run must have this table; a change of it breaks all trained models."""
    head = target_table(0, 8)[0, :3].tolist()
    assert head == pytest.approx([0.6348407, -0.3534303, 0.4358774], abs=1e-6)


def natural_prior() -> torch.Tensor:
    """A byte distribution with the entropy of text: about 3 nats over 60 bytes."""
    prior = torch.zeros(256, dtype=torch.float64)
    prior[32:92] = 1.0 / torch.arange(1, 61, dtype=torch.float64)
    return prior / prior.sum()


def entropy(prior: torch.Tensor) -> float:
    held = prior[prior > 0]
    return -float((held * held.log()).sum())


def two_point_information(distance: float, p: float, sigma: float) -> float:
    """I(y; z) of two points at a distance under Gaussian noise, by numerical integration.

    Only the line through the two points matters. Independent of the code under test: densities on
    a grid, and the difference of two entropies.
    """
    reach = distance + 12 * sigma
    z, step = np.linspace(-reach, reach, 200_001, retstep=True)
    densities = [
        weight * np.exp(-((z - mean) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
        for weight, mean in ((p, 0.0), (1 - p, distance))
    ]
    total = np.maximum(densities[0] + densities[1], 1e-300)
    conditional = 0.0  # H(y | z)
    for density in densities:
        share = np.maximum(density / total, 1e-300)
        conditional += float(np.sum(-density * np.log(share)) * step)
    return -(p * math.log(p) + (1 - p) * math.log(1 - p)) - conditional


@pytest.mark.parametrize("sigma", [0.2, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("p", [0.5, 0.9])
def test_leak_of_two_bytes_is_their_mutual_information(sigma: float, p: float) -> None:
    targets = target_table(1, 16)
    prior = torch.zeros(256)
    prior[65], prior[200] = p, 1 - p
    distance = float((targets[65] - targets[200]).norm())
    expected = two_point_information(distance, p, sigma)
    measured = leak_nats(targets, prior, sigma, samples=60_000)
    assert measured == pytest.approx(expected, abs=0.006)


def test_leak_limits_are_the_entropy_and_nothing() -> None:
    targets, prior = target_table(0, 32), natural_prior()
    assert leak_nats(targets, prior, 1e-3) == pytest.approx(entropy(prior), abs=0.03)
    assert abs(leak_nats(targets, prior, 1e3)) < 1e-4


def test_leak_falls_as_sigma_grows() -> None:
    targets, prior = target_table(0, 32), natural_prior()
    leaks = [leak_nats(targets, prior, sigma) for sigma in (0.02, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)]
    assert all(a >= b for a, b in itertools.pairwise(leaks))
    assert leaks[0] > 2.5 and leaks[-1] < 0.01


def test_leak_falls_as_the_square_of_sigma() -> None:
    """For weak evidence the information is the targets' variance / (2 sigma^2)."""
    targets, prior = target_table(0, 32), natural_prior()
    mean = prior @ targets.double()
    expected = float(1 - mean @ mean) / (2 * 4.0**2)
    assert leak_nats(targets, prior, 4.0, samples=60_000) == pytest.approx(expected, rel=0.1)


def test_leak_takes_counts_and_ignores_the_callers_generator() -> None:
    targets, prior = target_table(0, 16), natural_prior()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    leak = leak_nats(targets, prior, 2.0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert leak_nats(targets, prior * 12345, 2.0) == pytest.approx(leak, abs=1e-9)


def test_a_certain_byte_cannot_leak() -> None:
    prior = torch.zeros(256)
    prior[10] = 1.0
    assert leak_nats(target_table(0, 16), prior, 0.5) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("limit", "sigma_min", "width"), [(0.05, 0.9, 32), (0.2, 0.31, 8)])
def test_a_refusal_names_a_range_that_then_passes(
    limit: float, sigma_min: float, width: int
) -> None:
    targets, prior = target_table(0, width), natural_prior()
    noise = Noise(sigma_min=sigma_min, sigma_max=1.0, leak_limit_nats=limit)
    with pytest.raises(LeakError) as refused:
        refuse_leak(noise, targets, prior)
    hint = refused.value.hint
    found = re.search(r"--sigma-min (\S+) --sigma-max ([^\s,]+)", hint)
    assert found is not None
    low, high = (float(text) for text in found.groups())
    passing = Noise(sigma_min=low, sigma_max=high, leak_limit_nats=limit)
    assert refuse_leak(passing, targets, prior) <= limit
    # And no further than needed: 3 % lower would still leak too much.
    assert leak_nats(targets, prior, low / 1.03) > limit
    # The hint's other way passes too.
    raised = re.search(r"--leak-limit above (\S+)", hint)
    assert raised is not None
    studied = Noise(
        sigma_min=sigma_min, sigma_max=1.0, leak_limit_nats=float(raised.group(1)) + 1e-3
    )
    refuse_leak(studied, targets, prior)


def test_a_refusal_names_no_range_that_would_be_refused() -> None:
    noise = Noise(leak_limit_nats=1e-16)
    with pytest.raises(LeakError) as refused:
        refuse_leak(noise, target_table(0, 8), natural_prior())
    assert "--sigma-min" not in refused.value.hint and "--leak-limit" in refused.value.hint


def test_huge_sigmas_tell_nothing() -> None:
    assert abs(leak_nats(target_table(0, 8), natural_prior(), 1e200)) < 1e-6


def test_the_default_range_passes_for_text() -> None:
    noise = Noise()
    leak = refuse_leak(noise, target_table(0, 128), natural_prior())
    assert 0 < leak <= noise.leak_limit_nats
