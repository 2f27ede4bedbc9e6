"""Objectives: EDM's identities, and the Bayes posterior against Gaussian densities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from swarm.learning.model import Block
from swarm.learning.noise import Interval, draw_sigma, leak_nats, target_table
from swarm.learning.objective import (
    DenoisingObjective,
    Preconditioning,
    edm_logits,
    edm_weight,
    evidence,
    mean_edm_weight,
    noised,
)
from swarm.run import ModelShape, Noise
from tests.conftest import MakeRun, sharp_block

sigmas = st.floats(1e-3, 1e3)
sigma_datas = st.floats(0.05, 2.0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(seed: int = 0, rows: int = 4, length: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.randint(256, (rows, length + 1), generator=seeded(seed))
    return windows[:, :-1], windows[:, 1:]


def constant_block(prior: torch.Tensor, width: int = 16) -> Block:
    """A block whose F(x) is the log of a known prior, whatever the context."""
    block = Block(ModelShape(1, 1, width, 2, 16, "independent"), "bayes")
    with torch.no_grad():
        block.head.weight.zero_()
        block.head.bias.copy_(prior.log())
    return block.requires_grad_(False)


def random_prior() -> torch.Tensor:
    return torch.rand(256, generator=seeded(9), dtype=torch.float64).pow(3).add(1e-4)


@given(sigmas, sigma_datas)
def test_edm_identities(sigma: float, sigma_data: float) -> None:
    s = torch.tensor(sigma, dtype=torch.float64)
    c = Preconditioning.of(s, sigma_data)
    skip, out, in_ = (float(v) for v in (c.c_skip, c.c_out, c.c_in))
    # The network's input has unit variance.
    assert in_**2 * (sigma**2 + sigma_data**2) == pytest.approx(1.0)
    # The network's effective target (y - c_skip z) / c_out has unit variance.
    variance = ((1 - skip) ** 2 * sigma_data**2 + skip**2 * sigma**2) / out**2
    assert variance == pytest.approx(1.0)
    # c_skip makes c_out as small as can be: its derivative is zero there.
    assert (1 - skip) * sigma_data**2 == pytest.approx(skip * sigma**2)
    assert float(edm_weight(s, sigma_data)) * out**2 == pytest.approx(1.0)
    assert float(c.c_noise) == pytest.approx(math.log(sigma) / 4)


@given(sigma_datas)
def test_edm_limits(sigma_data: float) -> None:
    near = Preconditioning.of(torch.tensor(1e-9, dtype=torch.float64), sigma_data)
    assert float(near.c_skip) == pytest.approx(1.0)
    assert float(near.c_out) == pytest.approx(0.0, abs=1e-8)
    assert float(near.c_in) == pytest.approx(1 / sigma_data)
    far = Preconditioning.of(torch.tensor(1e9, dtype=torch.float64), sigma_data)
    assert float(far.c_skip) == pytest.approx(0.0, abs=1e-12)
    assert float(far.c_out) == pytest.approx(sigma_data)
    assert float(far.c_in) * 1e9 == pytest.approx(1.0)


def test_without_noise_the_edm_denoiser_returns_z(tiny_run: MakeRun) -> None:
    run = tiny_run(objective="edm", coupling="independent")
    block, targets = sharp_block(run, 0), target_table(0, 16)
    x, y = batch()
    z = targets[y]
    logits = edm_logits(block, x, z, torch.full((4,), 1e-6), targets)
    assert torch.allclose(logits, z @ targets.T * block.log_scale.exp(), atol=1e-3)
    assert torch.equal(logits.argmax(-1), y)


def test_far_out_the_edm_denoiser_is_the_networks_own(tiny_run: MakeRun) -> None:
    run = tiny_run(objective="edm", coupling="independent")
    block, targets = sharp_block(run, 0), target_table(0, 16)
    x, _ = batch()
    eps = torch.randn(4, 10, 16, generator=seeded(1))
    sigma = torch.full((4,), 1e5)
    logits = edm_logits(block, x, 1e5 * eps, sigma, targets)
    raw = block.denoised(block.hidden(x, z_scaled=eps, c_noise=sigma.log() / 4))
    expected = (16**-0.5 * raw) @ targets.T * block.log_scale.exp()
    assert torch.allclose(logits, expected, atol=1e-3)


def test_edm_denoiser_between_the_limits(tiny_run: MakeRun) -> None:
    """D = c_skip z + c_out F(c_in z, c_noise), each row of the batch with its own sigma."""
    run = tiny_run(objective="edm", coupling="independent")
    block, targets = sharp_block(run, 0), target_table(0, 16)
    x, y = batch()
    sigma = torch.tensor([0.1, 0.5, 2.0, 8.0])
    z = noised(y, targets, sigma, seeded(2))
    logits = edm_logits(block, x, z, sigma, targets)
    for row, s in enumerate(sigma.tolist()):
        total = s**2 + 1 / 16
        hidden = block.hidden(
            x[row : row + 1],
            z_scaled=z[row : row + 1] / math.sqrt(total),
            c_noise=torch.tensor([math.log(s) / 4]),
        )
        raw = block.denoised(hidden)[0]
        denoised = z[row] / 16 / total + s * 0.25 / math.sqrt(total) * raw
        expected = denoised @ targets.T * math.exp(float(block.log_scale))
        assert torch.allclose(logits[row], expected, atol=1e-4)


def test_mean_edm_weight_is_the_integral_over_the_blocks_sigmas() -> None:
    noise, interval, sigma_data = Noise(sigma_min=0.5), Interval(0.5, 4.0), 0.25
    # Independent: the lognormal's density on a fine grid of log sigma.
    t = np.linspace(math.log(interval.low), math.log(interval.high), 20_001)
    density = np.exp(-((t - noise.p_mean) ** 2) / (2 * noise.p_std**2))
    weight = (np.exp(2 * t) + sigma_data**2) / (np.exp(t) * sigma_data) ** 2
    expected = float((density * weight).sum() / density.sum())
    assert mean_edm_weight(noise, interval, sigma_data) == pytest.approx(expected, rel=1e-3)
    drawn = edm_weight(draw_sigma(noise, interval, 50_000, seeded(0)), sigma_data)
    assert float(drawn.mean()) == pytest.approx(expected, rel=0.01)


def test_noised_is_the_target_plus_sigma_times_unit_noise() -> None:
    targets = target_table(0, 32)
    y = torch.randint(256, (3, 2000), generator=seeded(0))
    sigma = torch.tensor([0.5, 2.0, 7.0])
    eps = (noised(y, targets, sigma, seeded(1)) - targets[y]) / sigma.view(-1, 1, 1)
    for row in eps:
        assert float(row.mean()) == pytest.approx(0.0, abs=0.02)
        assert float(row.std()) == pytest.approx(1.0, abs=0.02)
    assert not torch.allclose(eps[0], eps[1])


def exact_log_posterior(
    prior: torch.Tensor, z: torch.Tensor, sigma: float, targets: torch.Tensor
) -> np.ndarray:
    """log p(v | z) from Gaussian densities N(z; E_v, sigma^2 I) and Bayes' rule, in float64."""
    centres = targets.double().numpy()
    point = z.double().numpy()
    squares = ((point[..., None, :] - centres) ** 2).sum(-1)
    log_joint = np.log(prior.numpy() / prior.numpy().sum()) - squares / (2 * sigma**2)
    top = log_joint.max(-1, keepdims=True)
    return log_joint - top - np.log(np.exp(log_joint - top).sum(-1, keepdims=True))


@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
def test_bayes_with_the_true_prior_is_the_exact_posterior(sigma: float) -> None:
    targets, prior = target_table(3, 16), random_prior()
    block = constant_block(prior)
    x, y = batch()
    z = noised(y, targets, torch.full((4,), sigma), seeded(4))
    logits = block.logits(block.hidden(x)) + evidence(z, targets, torch.full((4,), sigma))
    expected = exact_log_posterior(prior, z, sigma, targets)
    assert np.allclose(F.log_softmax(logits, -1).numpy(), expected, atol=2e-4)


def test_bayes_loss_is_the_posteriors_cross_entropy() -> None:
    """Through `loss` itself: each row has its own sigma, drawn from the block's interval."""
    targets, prior = target_table(3, 16), random_prior()
    noise, interval = Noise(sigma_min=0.3, sigma_max=3.0), Interval(0.3, 3.0)
    objective = DenoisingObjective("bayes", noise, interval, targets)
    x, y = batch(rows=8)
    loss, hidden = objective.loss(constant_block(prior), x, y, None, seeded(6))
    twin = seeded(6)
    sigma = draw_sigma(noise, interval, 8, twin)
    z = noised(y, targets, sigma, twin)
    exact = [
        -exact_log_posterior(prior, z[r], float(sigma[r]), targets)[np.arange(10), y[r].numpy()]
        for r in range(8)
    ]
    assert float(loss) == pytest.approx(float(np.mean(exact)), abs=1e-4)
    assert hidden is not None and hidden.shape == (8, 10, 16)
    forced = objective.teacher_forced_ce(constant_block(prior), x, y, None, seeded(6))
    assert float(forced) == pytest.approx(float(loss), abs=1e-6)


def test_what_bayes_gains_from_z_is_the_leak() -> None:
    """Honest CE minus teacher-forced CE of a perfect block is `leak_nats`, by its definition."""
    targets, prior = target_table(3, 16), random_prior()
    interval = Interval(1.0, 1.0 + 1e-9)
    objective = DenoisingObjective("bayes", Noise(sigma_min=0.5), interval, targets)
    y = torch.multinomial(prior, 64 * 200, replacement=True, generator=seeded(1)).view(-1, 16)
    honest = -float((prior / prior.sum()).log()[y].mean())
    forced = objective.teacher_forced_ce(constant_block(prior), y, y, None, seeded(2))
    assert honest - float(forced) == pytest.approx(leak_nats(targets, prior, 1.0), abs=0.02)


def test_plain_ignores_z(tiny_run: MakeRun) -> None:
    block = sharp_block(tiny_run(objective="plain", coupling="independent"), 0)
    x, y = batch()
    losses = []
    for table, seed in ((target_table(0, 16), 0), (target_table(1, 16), 5)):
        objective = DenoisingObjective("plain", Noise(), Interval(5, 10), table)
        losses.append(float(objective.loss(block, x, y, None, seeded(seed))[0]))
        forced = objective.teacher_forced_ce(block, x, y, None, seeded(seed))
        assert float(forced) == pytest.approx(losses[-1], abs=1e-6)
    assert losses[0] == losses[1]
    log_probs = F.log_softmax(block.logits(block.hidden(x)), -1)
    by_hand = -log_probs.gather(-1, y[..., None]).mean()
    assert losses[0] == pytest.approx(float(by_hand), abs=1e-5)


def test_edm_loss_is_weighted_by_sigma(tiny_run: MakeRun) -> None:
    block = sharp_block(tiny_run(objective="edm", coupling="independent"), 0)
    noise, interval, targets = Noise(sigma_min=0.1), Interval(0.1, 2.0), target_table(0, 16)
    x, y = batch(rows=6)
    twin = seeded(8)
    sigma = draw_sigma(noise, interval, 6, twin)
    logits = edm_logits(block, x, noised(y, targets, sigma, twin), sigma, targets)
    rows = -F.log_softmax(logits, -1).gather(-1, y[..., None])[..., 0].mean(1)
    weight = edm_weight(sigma, 0.25) / mean_edm_weight(noise, interval, 0.25)
    weighted = DenoisingObjective("edm", noise, interval, targets)
    assert float(weighted.loss(block, x, y, None, seeded(8))[0]) == pytest.approx(
        float((rows * weight).mean()), rel=1e-5
    )
    # The teacher-forced CE stays a plain CE.
    forced = weighted.teacher_forced_ce(block, x, y, None, seeded(8))
    assert float(forced) == pytest.approx(float(rows.mean()), rel=1e-5)


def test_bayes_gives_the_network_no_way_to_read_z(tiny_run: MakeRun) -> None:
    """The hidden state, which is all that is trained or relayed, is the same for any z."""
    block = sharp_block(tiny_run(coupling="independent"), 0)
    objective = DenoisingObjective("bayes", Noise(), Interval(5, 10), target_table(0, 16))
    x, y = batch()
    _, first = objective.loss(block, x, y, None, seeded(0))
    _, second = objective.loss(block, x, y.flip(0), None, seeded(1))
    assert first is not None and second is not None and torch.equal(first, second)
