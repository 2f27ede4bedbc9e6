"""Writing with `--mode denoise`: all bytes of an output at once, from noise, in one traversal.

How a sweep goes from block to block, and how bytes are chosen in the end. The computation in a
block is `swarm.learning.joint_denoising`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from protocol.errors import UsageError
from swarm.learning.composition import ComposedModel
from swarm.learning.joint_denoising import JointDenoising
from swarm.run import Run
from swarm.writing.generate import Sampling
from swarm.writing.speculative import choose_rows
from swarm.writing.writer import SweepWriter

_CHOICE = 0x5EED  # bytes are drawn from another random stream than the first block's noise


@dataclass(frozen=True)
class Denoised:
    """A sweep after one block: the z that it read, and its posterior."""

    joint: JointDenoising
    block: int
    z: Tensor  # (length, width)
    posterior: Tensor  # (length, 256), log-probabilities

    def z_for(self, following: int) -> Tensor:
        """z at the sigma of the block that follows."""
        return self.joint.onward(self.z, self.posterior, self.block, following)


def choose_bytes(posterior: Tensor, sampling: Sampling) -> Tensor:
    """A byte for every position of (length, 256): the likeliest, or a sample."""
    generator = torch.Generator().manual_seed(sampling.seed ^ _CHOICE)
    return choose_rows(posterior.cpu(), sampling, generator)


def require_denoising(run: Run) -> None:
    """Raise `UsageError` if the run's blocks are not trained for joint denoising."""
    if not run.denoises:
        raise UsageError(
            "this model was not trained for the mode denoise",
            "use another --mode; a model learns it with `blockswarm train --denoise-share 0.25`, "
            "or with denoise_share in its run file",
        )


def write(model: ComposedModel, prompt: bytes, length: int, sampling: Sampling) -> bytes:
    """`length` bytes that follow the prompt, half a context or more per traversal of the blocks.

    Greedy output depends on the seed too, since it starts from noise.
    """
    require_denoising(model.run)
    joint = JointDenoising(model.run, model.targets)
    writer = SweepWriter(prompt, length, model.run.model.context, sampling)
    out = bytearray()
    while not writer.done:
        ask = writer.ask()
        posterior = traverse(model, joint, ask.context, ask.length, ask.seed)
        chosen = choose_bytes(posterior, replace(sampling, seed=ask.seed))
        out += writer.add(bytes(chosen.tolist()))
    return bytes(out)


def traverse(
    model: ComposedModel, joint: JointDenoising, context: bytes, length: int, seed: int
) -> Tensor:
    """The last block's posterior of `length` bytes (length, 256), after one pass of all blocks.

    Missing blocks are skipped: z steps down to the next block that is there.
    """
    there = [(index, block) for index, block in enumerate(model.blocks) if block is not None]
    known = torch.tensor([list(context)], device=model.device)
    z = joint.first_z(there[0][0], length, seed)[None]
    relay: Tensor | None = None
    posterior: Tensor | None = None
    for place, (index, block) in enumerate(there):
        if posterior is not None:
            z = joint.onward(z, posterior, there[place - 1][0], index)
        posterior, hidden = joint.denoise(block, index, known, z, relay)
        relay = hidden if model.run.model.relays else None
    assert posterior is not None  # a model has at least one block
    return posterior[0]
