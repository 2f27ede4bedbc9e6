"""Joint denoising of all output positions by one block: its training loss, and its part of a sweep.

A part of each batch trains it (`training.denoise_share`); sweeps of the mode `denoise` use it. A
text is known up to a cut; of every byte after it only z = E[byte] + sigma * eps is given. At the
input, the mean embedding given z takes the place of the byte. At the output, z's evidence of the
predicted byte is added analytically, as in the objective `bayes`: the network predicts a byte from
the known ones and the z of those between, never from its own z. Block 0 has the highest sigmas; a
sweep begins with pure noise, and each block takes one Euler step down to the next one's sigmas.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.learning.composition import euler_embedding
from swarm.learning.head_loss import Evidence
from swarm.learning.model import Block, NoisyInput
from swarm.learning.moving_copy import Readable
from swarm.learning.noise import sigma_edges
from swarm.learning.objective import evidence
from swarm.run import Run

AT_THE_TOP = 0.5  # share of rows at the highest sigma of each block, the one that sweeps use
LONGEST_CUT = 0.75  # of a row: at least a quarter of it is denoised


@dataclass(frozen=True)
class Rows:
    """Rows of a batch to be denoised. All blocks' z come from the same `eps` and `level`."""

    x: Tensor  # (rows, length); only the first `cut` bytes of a row are read
    y: Tensor
    cut: Tensor  # (rows,): how many bytes are known
    eps: Tensor  # (rows, length, width)
    level: Tensor  # (rows,), on the CPU: 0 is the highest sigma of a block, 1 its lowest


def draw_rows(x: Tensor, y: Tensor, width: int, generator: torch.Generator) -> Rows:
    """Draw cuts, levels and noise for a batch. Cuts may be early, since prompts may be short."""
    rows, length = x.shape
    longest = max(1, int(length * LONGEST_CUT))
    cut = torch.randint(1, longest + 1, (rows,), generator=generator)
    level = torch.rand(rows, generator=generator, dtype=torch.float64)
    inside = torch.rand(rows, generator=generator) >= AT_THE_TOP
    eps = torch.randn(rows, length, width, generator=generator)
    return Rows(x, y, cut.to(x.device), eps.to(x.device), level * inside)


class JointDenoising:
    """Joint denoising of a run: the sigmas and targets that its blocks share."""

    def __init__(self, run: Run, targets: Tensor) -> None:
        self.noise = run.joint_noise()
        self.edges = tuple(sigma_edges(self.noise, run.model.blocks))
        self.targets = targets

    def on(self, device: torch.device) -> JointDenoising:
        """A copy for blocks on another device."""
        moved = copy.copy(self)
        moved.targets = self.targets.to(device)
        return moved

    # --- training -------------------------------------------------------------------------------

    def sigma(self, block: int, level: Tensor) -> Tensor:
        """The block's sigma at a level: 0 its highest, 1 its lowest, uniform in probability."""
        high, low = self.edges[block], self.edges[block + 1]
        top, bottom = self.noise.probability(high), self.noise.probability(low)
        probability = (top - (top - bottom) * level).double()
        sigma = torch.exp(self.noise.p_mean + self.noise.p_std * torch.special.ndtri(probability))
        return sigma.clamp(low, high).float()

    def z(self, block: int, rows: Rows) -> Tensor:
        """The noised targets. Only for training, since it reads the bytes after the cut."""
        return self.targets[rows.y] + self._sigma(block, rows).view(-1, 1, 1) * rows.eps

    def hidden(self, module: Block, block: int, rows: Rows, relay: Tensor | None) -> Tensor:
        """A block's hidden state from the known bytes and the z of the others."""
        at = torch.arange(rows.x.shape[1], device=rows.x.device)
        known = at < rows.cut[:, None]
        seen = self._likelihood(self.z(block, rows), self._sigma(block, rows))
        # z at a position is of the byte predicted there, which is the next position's input.
        before = F.pad(seen, (0, 0, 1, 0))[:, :-1]
        return module.hidden(rows.x * known, relay, noisy=NoisyInput(known, before))

    def loss(
        self, module: Block, block: int, rows: Rows, relay: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Mean nats of the bytes after the cut, and the hidden state for the next block."""
        hidden = self.hidden(module, block, rows, relay)
        at = torch.arange(rows.x.shape[1], device=rows.x.device)
        scored = at >= rows.cut[:, None] - 1
        sigma = self._sigma(block, rows)[:, None].expand_as(rows.y)
        known = Evidence(self.z(block, rows)[scored], self.targets, sigma[scored])
        return module.head_loss(hidden[scored], rows.y[scored], known), hidden

    @torch.no_grad()
    def relayed(self, upstream: Sequence[Readable], rows: Rows) -> Tensor | None:
        """The hidden state relayed by the blocks before, each with z at its own, higher sigma."""
        relay: Tensor | None = None
        for block, held in enumerate(upstream):
            with held.at_hand() as module:
                relay = self.hidden(module, block, rows, relay)
        return relay

    def _sigma(self, block: int, rows: Rows) -> Tensor:
        return self.sigma(block, rows.level).to(rows.x.device)

    def _likelihood(self, z: Tensor, sigma: Tensor) -> Tensor:
        # At low sigmas half precision would be off by whole nats.
        with torch.autocast(z.device.type, enabled=False):
            return evidence(z.float(), self.targets, sigma)

    # --- a sweep --------------------------------------------------------------------------------

    def first_z(self, block: int, length: int, seed: int) -> Tensor:
        """(length, width): noise at the highest sigma of the first block of a sweep."""
        generator = torch.Generator().manual_seed(seed)
        eps = torch.randn(length, self.targets.shape[1], generator=generator)
        return self.edges[block] * eps.to(self.targets.device)

    @torch.no_grad()
    def denoise(
        self, module: Block, block: int, context: Tensor, z: Tensor, relay: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One block's part of a sweep, from (batch, context) bytes and (batch, length, width) of z.

        Returns the posterior of every output byte (batch, length, 256), as log-probabilities, and
        the hidden state at all context + length positions.
        """
        start, length = context.shape[1], z.shape[1]
        sigma = torch.full((len(z),), self.edges[block], device=z.device)
        seen = self._likelihood(z, sigma)
        known = (torch.arange(start + length, device=z.device) < start).expand(len(z), -1)
        noisy = NoisyInput(known, F.pad(seen, (0, 0, start, 0)))
        hidden = module.hidden(F.pad(context, (0, length)), relay, noisy=noisy)
        logits = module.logits(hidden[:, start - 1 : -1]).float() + seen
        return F.log_softmax(logits, dim=-1), hidden

    def onward(self, z: Tensor, posterior: Tensor, block: int, following: int) -> Tensor:
        """One Euler step of z, from a block's sigma down to that of the one that follows."""
        mean = posterior.exp() @ self.targets
        return euler_embedding(z, mean, self.edges[block], self.edges[following])
