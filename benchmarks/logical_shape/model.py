"""The shapes of the logical-shape benchmark, and blocks of them that fit into this machine.

Decides how many parameters a shape has, how many of its layers are physical, and how a block is
made whose layers share weights. Everything but the sharing is the product's: the same classes, the
same shapes in every product and cache. The weights are random: what is written means nothing, what
is measured is the serving. Knows nothing of hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.logical_shape.matmul import HalfLinear, Ways
from protocol.frames import content_digest
from swarm.cost import block_parameters
from swarm.learning.model import Block, Layer, LayerCache, NoisyInput, RotaryPositions
from swarm.run import ModelShape, Run, Training

BLOCKS = 3
CONTEXT = 256
BYTES_PER_PARAMETER = 2  # fp16

Spent = Callable[[int, float, float], None]  # positions, seconds, seconds of CPU
SPENT = "spent.jsonl"  # of a host: a line for every pass through its block


@dataclass(frozen=True)
class LogicalShape:
    """Three blocks of `layers` layers, `physical` of them with weights of their own.

    All of them where three hosts fit into the machine's memory. Otherwise few, but never so few
    that they would stay in a CPU's cache, where no real layer is when its turn comes.
    """

    label: str
    width: int
    layers: int
    heads: int
    physical: int

    @property
    def run(self) -> Run:
        """Relay and joint denoising, as a run that serves whole outputs would have them."""
        shape = ModelShape(BLOCKS, self.layers, self.width, self.heads, CONTEXT, "look_ahead")
        return Run(shape, training=Training(denoise_share=0.25))

    @property
    def parameters(self) -> int:
        return sum(block_parameters(self.run))

    @property
    def physical_bytes(self) -> int:
        """What the layers of one host take in memory."""
        return self.physical * 12 * self.width**2 * BYTES_PER_PARAMETER

    def digest(self, block: int) -> bytes:
        """Names a block's weights: all that they are drawn from."""
        text = f"logical {self.width} {self.layers} {self.heads} {self.physical} {block}"
        return content_digest(text.encode())


SHAPES = {
    shape.label: shape
    for shape in (
        LogicalShape("tiny", 64, 4, 2, 2),
        LogicalShape("0.1B", 832, 4, 13, 4),
        LogicalShape("1B", 1664, 10, 13, 10),
        LogicalShape("7B", 3584, 15, 28, 6),
        LogicalShape("75B", 8512, 29, 76, 1),
    )
}


class TimedBlock(Block):
    """A block that tells how long its layers took."""

    spent: Spent | None = None

    def hidden(
        self,
        x: Tensor,
        relay: Tensor | None = None,
        cache: list[LayerCache] | None = None,
        z_scaled: Tensor | None = None,
        c_noise: Tensor | None = None,
        noisy: NoisyInput | None = None,
    ) -> Tensor:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        out = super().hidden(x, relay, cache, z_scaled, c_noise, noisy)
        if self.spent is not None:
            cpu_s = time.thread_time() - began_cpu_s  # of this thread: hosts have no other
            self.spent(x.numel(), time.perf_counter() - began_s, cpu_s)
        return out


@torch.no_grad()
def shared_block(shape: LogicalShape, block: int, ways: Ways) -> TimedBlock:
    """A block with all of its layers, `physical` of them with weights of their own."""
    run, generator = shape.run, torch.Generator().manual_seed(block)
    with torch.device("meta"):  # the logical block is larger than this machine
        module = TimedBlock(run.model, run.training.objective, block == 0, run.denoises)
    rotary = RotaryPositions(CONTEXT, shape.width // shape.heads)
    physical = [_physical_layer(run.model, rotary, ways, generator) for _ in range(shape.physical)]
    module.layers = nn.ModuleList(physical[i % len(physical)] for i in range(shape.layers))
    if module.relay_in is not None:
        weight = torch.eye(shape.width, dtype=torch.float16)
        # Called like the Linear that a block declares, and never asked for anything else.
        module.relay_in = HalfLinear(weight, ways)  # type: ignore[assignment]
    _draw_rest(module, generator)
    return module.requires_grad_(False)


def _physical_layer(
    shape: ModelShape, rotary: RotaryPositions, ways: Ways, generator: torch.Generator
) -> Layer:
    """A layer with its weights in fp16, drawn as the product draws them."""
    with torch.device("meta"):
        layer = Layer(shape, shape.layers, rotary)
    for name in ("attention_norm", "mlp_norm"):
        setattr(layer, name, nn.Parameter(torch.ones(shape.width)))
    branches = 2 * shape.layers
    for name, share in (("qkv", 1), ("attention_out", branches), ("up", 1), ("down", branches)):
        rows, columns = getattr(layer, name).weight.shape
        std = (columns * share) ** -0.5
        setattr(layer, name, HalfLinear(_half_normal(rows, columns, std, generator), ways))
    return layer


def _half_normal(rows: int, columns: int, std: float, generator: torch.Generator) -> Tensor:
    """Row by row: as fp32 it would not fit."""
    weight = torch.empty(rows, columns, dtype=torch.float16)
    for start in range(0, rows, 256):
        part = weight[start : start + 256]
        part.copy_(torch.randn(part.shape, generator=generator).mul_(std))
    return weight


def _draw_rest(module: TimedBlock, generator: torch.Generator) -> None:
    """Embedding and head, as in a new block; what joint denoising adds."""
    module.embedding.to_empty(device="cpu")
    module.head.to_empty(device="cpu")
    module.embedding.weight.normal_(generator=generator)
    module.head.weight.normal_(std=0.02, generator=generator)
    module.head.bias.zero_()
    assert module.unknown is not None and module.byte_prior is not None
    module.unknown = nn.Parameter(torch.zeros(module.unknown.shape))
    module.byte_prior = nn.Parameter(torch.zeros(module.byte_prior.shape))
