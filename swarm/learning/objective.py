"""The local denoising objectives: how z enters a block's prediction.

`bayes`: p(v | z, x) = softmax_v(F(x)_v + <z, E_v> / sigma^2). The network sees only the context,
and z's evidence is added analytically, so it cannot learn to read its target from z.
`edm`: z is an input, with Karras' preconditioning, and the loss is a weighted cross entropy.
`plain`: the control with z removed. Names are the EDM paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.learning.head_loss import Evidence
from swarm.learning.model import Block, LayerCache
from swarm.learning.noise import Interval, draw_sigma
from swarm.run import Noise


@dataclass(frozen=True)
class Preconditioning:
    """c_skip, c_out, c_in and c_noise of a sigma, for data of standard deviation sigma_data."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor

    @classmethod
    def of(cls, sigma: Tensor, sigma_data: float) -> Preconditioning:
        total = sigma**2 + sigma_data**2
        return cls(
            c_skip=sigma_data**2 / total,
            c_out=sigma * sigma_data / total.sqrt(),
            c_in=1.0 / total.sqrt(),
            c_noise=0.25 * sigma.log(),
        )


def edm_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """EDM's loss weight (sigma^2 + sigma_data^2) / (sigma * sigma_data)^2."""
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def mean_edm_weight(noise: Noise, interval: Interval, sigma_data: float) -> float:
    """The weight's mean over a block's sigmas, so that every block's loss has the same scale."""
    low, high = noise.probability(interval.low), noise.probability(interval.high)
    points = [noise.quantile(low + (high - low) * (i + 0.5) / 512) for i in range(512)]
    return float(edm_weight(torch.tensor(points, dtype=torch.float64), sigma_data).mean())


def evidence(z: Tensor, targets: Tensor, sigma: Tensor) -> Tensor:
    """<z, E_v> / sigma^2: the log-likelihood of z for every byte v, up to a constant.

    The targets have unit norm, so |E_v|^2 is the same for all v and cancels in the softmax.
    """
    return z @ targets.T / (sigma**2).view(-1, 1, 1)


def noised(y: Tensor, targets: Tensor, sigma: Tensor, generator: torch.Generator) -> Tensor:
    """z = E[y] + sigma * eps. Only training and the teacher-forced probe may call this."""
    eps = torch.randn(*y.shape, targets.shape[1], generator=generator).to(targets.device)
    return targets[y] + sigma.view(-1, 1, 1) * eps


def edm_logits(
    block: Block,
    x: Tensor,
    z: Tensor,
    sigma: Tensor,
    targets: Tensor,
    cache: list[LayerCache] | None = None,
) -> Tensor:
    """Logits <D, E_v> * scale with D = c_skip z + c_out F(c_in z, c_noise, x)."""
    sigma_data = targets.shape[1] ** -0.5
    c = Preconditioning.of(sigma.view(-1, 1, 1), sigma_data)
    hidden = block.hidden(x, cache=cache, z_scaled=c.c_in * z, c_noise=c.c_noise.view(-1))
    denoised = c.c_skip * z + c.c_out * block.denoised(hidden)
    return denoised @ targets.T * block.log_scale.exp()


class DenoisingObjective:
    """A block's loss: everything it needs besides the network. One instance per worker."""

    def __init__(self, kind: str, noise: Noise, interval: Interval, targets: Tensor) -> None:
        self.kind = kind
        self.noise = noise
        self.interval = interval
        self.targets = targets
        self.sigma_data = targets.shape[1] ** -0.5

    def loss(
        self, block: Block, x: Tensor, y: Tensor, relay: Tensor | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """The block's loss in nats per byte and its hidden state (None for `edm`)."""
        if self.kind == "plain":
            hidden = block.hidden(x, relay)
            return block.head_loss(hidden, y), hidden
        sigma = draw_sigma(self.noise, self.interval, x.shape[0], generator).to(x.device)
        z = noised(y, self.targets, sigma, generator)
        if self.kind == "bayes":
            hidden = block.hidden(x, relay)
            each = sigma.unsqueeze(1).expand(y.shape).flatten()
            rows = Evidence(z.flatten(0, 1), self.targets, each)
            return block.head_loss(hidden, y, rows), hidden
        losses = _cross_entropy(edm_logits(block, x, z, sigma, self.targets), y)
        weight = edm_weight(sigma, self.sigma_data)
        scale = mean_edm_weight(self.noise, self.interval, self.sigma_data)
        return (losses.mean(1) * weight / scale).mean(), None

    def teacher_forced_ce(
        self, block: Block, x: Tensor, y: Tensor, relay: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """CE with z made from the target, as in training, but unweighted.

        Not a measure of quality; compared with the honest CE it shows the leak.
        """
        sigma = draw_sigma(self.noise, self.interval, x.shape[0], generator).to(x.device)
        z = noised(y, self.targets, sigma, generator)
        if self.kind == "edm":
            return _cross_entropy(edm_logits(block, x, z, sigma, self.targets), y).mean()
        logits = block.logits(block.hidden(x, relay))
        if self.kind == "bayes":
            logits = logits + evidence(z, self.targets, sigma)
        return _cross_entropy(logits, y).mean()


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """(batch, length) nats."""
    flat = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return flat.view(y.shape)
