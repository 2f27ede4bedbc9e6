"""The network: causal Transformer layers and a self-contained block.

A block has its own context embedding, layers and head. From bytes, and with relay the hidden state
of the block before it, it computes a hidden state and logits.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protocol.errors import UsageError
from swarm.learning.gradients import relu_squared, rms_norm, rotate_qk
from swarm.learning.head_loss import Evidence, head_loss
from swarm.run import VOCABULARY, ModelShape, Objective, Run


def draw(weight: Tensor, std: float) -> None:
    """Normal weights, drawn in float64: in float32 their last bits differ between CPUs, and all
    hosts of a run must start from the same ones."""
    with torch.no_grad():
        weight.copy_(nn.init.normal_(torch.empty(weight.shape, dtype=torch.float64), std=std))


class LayerCache:
    """Keys and values of the positions that one layer has seen."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values

    def truncate(self, length: int) -> None:
        """Forget what came after `length` positions (a draft that was not accepted)."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys[:, :, :length]
            self.values = self.values[:, :, :length]


class RotaryPositions(nn.Module):
    """Rotary position embedding with tables for `context` positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, head_width: int) -> None:
        super().__init__()
        frequency = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
        angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, qkv: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, length, 3, heads, head_width) -> q, k, v of (batch, heads, length, head_width).

        q and k are rotated; the first position is `start`.
        """
        end = start + qkv.shape[1]
        if end > self.cos.shape[0]:  # one row left would broadcast to all positions
            raise UsageError(f"{end} bytes do not fit a context of {self.cos.shape[0]}")
        return rotate_qk(qkv, self.cos[start:end], self.sin[start:end])


class Layer(nn.Module):
    """Pre-norm attention and MLP, with an optional modulation of both norms."""

    def __init__(self, shape: ModelShape, depth: int, rotary: RotaryPositions) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.rotary = rotary
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for linear in (self.qkv, self.up):
            draw(linear.weight, width**-0.5)
        for linear in (self.attention_out, self.down):
            # 2 * depth branches add up on the residual stream: keep their sum of order one.
            draw(linear.weight, (linear.in_features * 2 * depth) ** -0.5)

    def forward(
        self, x: Tensor, modulation: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        h = rms_norm(x, self.attention_norm)
        if modulation is not None:
            h = h * (1 + modulation[:, 0:1]) + modulation[:, 1:2]
        x = _added(self.attention_out(self._attend(h, cache)), x)
        h = rms_norm(x, self.mlp_norm)
        if modulation is not None:
            h = h * (1 + modulation[:, 2:3]) + modulation[:, 3:4]
        # Squared ReLU learns as well as GELU and takes a third of its time on a CPU.
        return _added(self.down(relu_squared(self.up(h))), x)

    def _attend(self, h: Tensor, cache: LayerCache | None) -> Tensor:
        batch, length, width = h.shape
        start = cache.length if cache is not None else 0
        heads = self.qkv(h).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.rotary(heads, start)
        if cache is not None:
            k, v = cache.extend(k, v)
        if start == 0:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            seen = torch.ones(length, start + length, dtype=torch.bool, device=h.device)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.tril(start))
        return out.transpose(1, 2).reshape(batch, length, width)


def _added(branch: Tensor, x: Tensor) -> Tensor:
    """branch + x, in the memory of `branch` unless that has a lower precision."""
    return branch.add_(x) if branch.dtype == x.dtype else x + branch


class SigmaModulation(nn.Module):
    """c_noise = ln(sigma) / 4 -> Fourier features -> scale and shift of every layer's norms."""

    def __init__(self, width: int, layers: int, hidden: int = 64, frequencies: int = 8) -> None:
        super().__init__()
        self.layers, self.width, self.frequencies = layers, width, frequencies
        self.inner = nn.Linear(2 * frequencies, hidden)
        self.outer = nn.Linear(hidden, layers * 4 * width)
        nn.init.zeros_(self.outer.weight)  # starts as the identity
        nn.init.zeros_(self.outer.bias)

    def forward(self, c_noise: Tensor) -> Tensor:
        """(batch,) -> (batch, layers, 4, width)."""
        scale = torch.exp2(torch.arange(self.frequencies, device=c_noise.device) - 1.0)
        angle = c_noise[:, None] * scale
        features = torch.cat([angle.sin(), angle.cos()], dim=-1)
        out: Tensor = self.outer(F.silu(self.inner(features)))
        return out.view(-1, self.layers, 4, self.width)


class NoisyInput(NamedTuple):
    """Which input bytes are known (joint denoising), and the likelihoods of the others."""

    known: Tensor  # (batch, length): true where the byte itself is given
    likelihood: Tensor  # (batch, length, 256): elsewhere, log p(z of that byte | byte)


class Block(nn.Module):
    """One block. With the objective `edm` it also takes z; otherwise only the context.

    With `denoises` it can also read unknown bytes, as the mean embedding under their posterior,
    which takes only two more parameter vectors.
    """

    def __init__(
        self,
        shape: ModelShape,
        objective: Objective = "bayes",
        first: bool = True,
        denoises: bool = False,
    ) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, width)
        draw(self.embedding.weight, 1.0)
        rotary = RotaryPositions(shape.context, width // shape.heads)
        self.layers = nn.ModuleList(Layer(shape, shape.layers, rotary) for _ in range(shape.layers))
        self.relay_in: nn.Linear | None = None
        if shape.relays and not first:
            self.relay_in = nn.Linear(width, width, bias=False)
            nn.init.eye_(self.relay_in.weight)
        self.z_in: nn.Linear | None = None
        self.sigma_modulation: SigmaModulation | None = None
        if objective == "edm":
            self.z_in = nn.Linear(width, width, bias=False)
            draw(self.z_in.weight, width**-0.5)
            self.sigma_modulation = SigmaModulation(width, shape.layers)
            self.denoised_out = nn.Linear(width, width)
            draw(self.denoised_out.weight, 0.02)
            nn.init.zeros_(self.denoised_out.bias)
            # The logits are <D, E_v> times a learned scale: with unit vectors alone they are small.
            self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        else:
            self.head = nn.Linear(width, VOCABULARY)
            draw(self.head.weight, 0.02)
            nn.init.zeros_(self.head.bias)
        self.unknown: nn.Parameter | None = None
        self.byte_prior: nn.Parameter | None = None
        if denoises:
            self.unknown = nn.Parameter(torch.zeros(width))
            self.byte_prior = nn.Parameter(torch.zeros(VOCABULARY))

    def hidden(
        self,
        x: Tensor,
        relay: Tensor | None = None,
        cache: list[LayerCache] | None = None,
        z_scaled: Tensor | None = None,
        c_noise: Tensor | None = None,
        noisy: NoisyInput | None = None,
    ) -> Tensor:
        """The hidden state that the head reads, and that the next block relays."""
        u: Tensor = self.embedding(x)
        if noisy is not None:
            u = torch.where(noisy.known.unsqueeze(-1), u, self._guessed(noisy.likelihood))
        if self.relay_in is not None and relay is not None:
            u = u + self.relay_in(F.rms_norm(relay, relay.shape[-1:]))
        modulation: Tensor | None = None
        if self.z_in is not None and self.sigma_modulation is not None:
            assert z_scaled is not None and c_noise is not None
            u = u + self.z_in(z_scaled)
            modulation = self.sigma_modulation(c_noise)
        for index, layer in enumerate(self.layers):
            u = layer(
                u,
                None if modulation is None else modulation[:, index],
                None if cache is None else cache[index],
            )
        return u

    def _guessed(self, likelihood: Tensor) -> Tensor:
        """The mean embedding of a byte given its z. The likelihoods contain all that z says of the
        byte, so neither z nor sigma has to be an input of the network."""
        assert self.unknown is not None and self.byte_prior is not None
        belief = torch.softmax(self.byte_prior + likelihood, dim=-1)
        return self.unknown + belief @ self.embedding.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """F(x): the prediction from the context, without the evidence of z."""
        out: Tensor = self.head(F.rms_norm(hidden, hidden.shape[-1:]))
        return out

    def head_loss(self, hidden: Tensor, y: Tensor, evidence: Evidence | None = None) -> Tensor:
        """Mean nats of y under softmax(logits(hidden) + evidence)."""
        return head_loss(self.head, F.rms_norm(hidden, hidden.shape[-1:]), y, evidence)

    def denoised(self, hidden: Tensor) -> Tensor:
        """The EDM network's raw output F_theta, before c_skip and c_out."""
        out: Tensor = self.denoised_out(F.rms_norm(hidden, hidden.shape[-1:]))
        return out

    def new_cache(self) -> list[LayerCache]:
        return [LayerCache() for _ in self.layers]

    def at_hand(self, keep: bool = False) -> AbstractContextManager[Block]:
        """The block itself, for the protocol `swarm.learning.moving_copy.Readable`."""
        return nullcontext(self)


def block_of(run: Run, block: int) -> Block:
    """A block of the run's shape, to load weights into."""
    return Block(run.model, run.training.objective, block == 0, run.denoises)


def make_block(
    shape: ModelShape,
    objective: Objective,
    block: int,
    generator: torch.Generator,
    denoises: bool = False,
) -> Block:
    """A freshly initialised block whose weights depend on the generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        return Block(shape, objective, block == 0, denoises)
