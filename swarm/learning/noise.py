"""The sigmas of each block, the target table, and how much of the target z leaks at a sigma.

[sigma_min, sigma_max] is divided among the blocks. Block 0 has the highest noise: a sweep starts
there and goes down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from protocol.errors import LeakError, UsageError
from swarm.run import VOCABULARY, Noise


@dataclass(frozen=True)
class Interval:
    """The sigmas of one block: `low` <= sigma <= `high`."""

    low: float
    high: float


def sigma_edges(noise: Noise, blocks: int) -> list[float]:
    """blocks + 1 sigmas, descending, that cut the truncated lognormal into equal probability."""
    low, high = (noise.probability(s) for s in (noise.sigma_min, noise.sigma_max))
    inner = [noise.quantile(high - (high - low) * index / blocks) for index in range(1, blocks)]
    return [noise.sigma_max, *inner, noise.sigma_min]


def block_interval(noise: Noise, blocks: int, block: int) -> Interval:
    """The block's interval, widened by `overlap` of its log width and kept inside the range."""
    edges = sigma_edges(noise, blocks)
    high, low = edges[block], edges[block + 1]
    stretch = (high / low) ** noise.overlap
    return Interval(max(noise.sigma_min, low / stretch), min(noise.sigma_max, high * stretch))


def draw_sigma(noise: Noise, interval: Interval, count: int, generator: torch.Generator) -> Tensor:
    """`count` sigmas from the lognormal truncated to the interval, by inverting its CDF."""
    low, high = noise.probability(interval.low), noise.probability(interval.high)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    probability = low + (high - low) * uniform
    sigma = torch.exp(noise.p_mean + noise.p_std * torch.special.ndtri(probability))
    return sigma.clamp(interval.low, interval.high).to(torch.float32)


def target_table(seed: int, width: int) -> Tensor:
    """E: a fixed row of unit norm for every byte, from the run's seed, equal on every host."""
    generator = torch.Generator().manual_seed(seed ^ 0x7A26_E7)
    rows = torch.randn(VOCABULARY, width, generator=generator, dtype=torch.float64)
    return F.normalize(rows, dim=-1).to(torch.float32)


def leak_nats(
    targets: Tensor, byte_probability: Tensor, sigma: float, samples: int = 16384
) -> float:
    """What z alone tells of its target: H(p) - CE of the Bayes posterior of z with prior p.

    A Monte Carlo estimate in float64; the targets' unit norms cancel in the posterior. Needs no
    network, so a run can be refused before it is trained.
    """
    generator = torch.Generator().manual_seed(0)
    prior = byte_probability.to(torch.float64)
    prior = prior / prior.sum()
    log_prior = prior.clamp_min(1e-300).log()
    table = targets.to(torch.float64)
    y = torch.multinomial(prior, samples, replacement=True, generator=generator)
    z = table[y] + sigma * torch.randn(samples, table.shape[1], generator=generator).double()
    posterior = (log_prior + z @ table.T / sigma / sigma).log_softmax(-1)  # its square may overflow
    # The same sample in both terms, so that their noise cancels.
    return float((posterior.gather(1, y[:, None])[:, 0] - log_prior[y]).mean())


def refuse_leak(noise: Noise, targets: Tensor, byte_probability: Tensor) -> float:
    """The leak at sigma_min; a `LeakError` with the range that would pass if it is too high."""
    leak = leak_nats(targets, byte_probability, noise.sigma_min)
    if leak <= noise.leak_limit_nats:
        return leak

    def passes(sigma: float) -> bool:
        return leak_nats(targets, byte_probability, sigma) <= noise.leak_limit_nats

    wider = _allowed(noise, _smallest_that_passes(passes, noise.sigma_min))
    raise LeakError(
        f"at sigma_min {noise.sigma_min:g} the noised target still tells {leak:.3f} nats of the "
        f"byte it hides; the limit is {noise.leak_limit_nats:g}",
        (f"use {wider}, or raise " if wider else "raise ")
        + f"--leak-limit above {leak:.3f} to study the leak",
    )


def _allowed(noise: Noise, sigma: float) -> str:
    """The options for a range that begins at this sigma, or "" if it is no valid range."""
    low, high = float(f"{sigma:.3g}"), float(f"{max(noise.sigma_max, 2 * sigma):.3g}")
    try:
        replace(noise, sigma_min=low, sigma_max=high)
    except UsageError:
        return ""
    return f"--sigma-min {low:g} --sigma-max {high:g}"


def _smallest_that_passes(passes: Callable[[float], bool], low: float) -> float:
    high = max(low, 1e-3)  # below that z always gives the target away
    while not passes(high) and high < 1e6:
        high *= 2.0
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high * 1.005  # rounded up a little: the hint must pass when it is typed back
