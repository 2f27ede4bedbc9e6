"""A block's weights as one flat vector, as the consensus and updates use them.

Parameters are in order of their names, each row-major. The layout follows from the run's shape, so
it is never sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protocol.errors import ModelError
from swarm.learning.model import Block
from swarm.learning.worker import initial_block
from swarm.run import Run

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Change:
    """A change to add to a flat vector: to all of it, or only at `indices`, which ascend."""

    indices: npt.NDArray[np.integer[Any]] | None
    values: Floats

    def add_to(self, flat: Floats) -> None:
        if self.indices is None:
            flat += self.values
        else:
            np.add.at(flat, self.indices, self.values)


def flat_size(block: Block) -> int:
    return sum(parameter.numel() for parameter in block.parameters())


def flat_weights(block: Block, out: Floats | None = None) -> Floats:
    """The block's weights, copied into `out` or into a new vector."""
    if out is None:
        out = np.empty(flat_size(block), dtype=np.float32)
    target = torch.from_numpy(out)
    at = 0
    with torch.no_grad():
        for _, parameter in sorted(block.named_parameters()):
            target[at : at + parameter.numel()].copy_(parameter.detach().reshape(-1))
            at += parameter.numel()
    return out


def load_flat(block: Block, flat: Floats) -> None:
    """Set the block's weights in place, so that an optimizer's references stay valid."""
    if flat.shape != (flat_size(block),):
        raise ModelError(f"{flat.shape} weights for a block of {flat_size(block)}")
    source = torch.from_numpy(np.ascontiguousarray(flat, dtype=np.float32))
    at = 0
    with torch.no_grad():
        for _, parameter in sorted(block.named_parameters()):
            piece = source[at : at + parameter.numel()]
            parameter.copy_(piece.view(parameter.shape))
            at += parameter.numel()


def add_flat(block: Block, change: Floats) -> None:
    """Add a flat vector to the block's weights, in place."""
    source = torch.from_numpy(change)
    at = 0
    with torch.no_grad():
        for _, parameter in sorted(block.named_parameters()):
            piece = source[at : at + parameter.numel()].to(parameter.device)
            parameter.add_(piece.view(parameter.shape))
            at += parameter.numel()


def add_flat_at(block: Block, change: Change) -> None:
    """Add a `Change` to the block's weights, in place; touches only the weights at its indices."""
    indices, values = change.indices, change.values
    if indices is None:
        return add_flat(block, values)
    at = 0
    with torch.no_grad():
        for _, parameter in sorted(block.named_parameters()):
            ends = np.array([at, at + parameter.numel()], dtype=indices.dtype)  # else all are cast
            here = slice(*np.searchsorted(indices, ends))
            places = torch.from_numpy(indices[here].astype(np.int64) - at).to(parameter.device)
            piece = torch.from_numpy(values[here]).to(parameter.device)
            parameter.view(-1).index_add_(0, places, piece)
            at += parameter.numel()
    return None


def initial_flat(run: Run, block: int) -> Floats:
    """The weights before the first round, which follow from the run's seed."""
    return flat_weights(initial_block(run, block))
