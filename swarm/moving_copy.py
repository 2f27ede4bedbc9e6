"""A forward-only copy of another block that moves towards the version it follows, a part each step.

A copy that jumps to every new version makes a worker's input, and the loss that it looks ahead to,
another one once a round, and the worker spends the round on getting used to it. Moved by a small
part of the way in each step, copies are slow averages of their block's versions, as the targets of
other methods of delayed learning are. Decides how they move; which version they follow is
`coupling`'s business.

A version to move to may be given in half precision, and in a swarm it is: it is as large as the
copy itself, a worker holds one for every block that it reads, and three digits are enough for
something that is a round old.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from swarm.model import Block


class MovingCopy:
    """`block` is the copy to read. It stands still until it has something to follow."""

    def __init__(self, block: Block, steps: float) -> None:
        self.block = frozen_copy(block)
        self.part = 1.0 / steps
        self._own = [parameter.data for _, parameter in sorted(self.block.named_parameters())]
        self._target: list[Tensor] | None = None

    def follow(self, version: Block) -> None:
        """Move towards the weights of this block from now on. The first time it goes there."""
        self._aim([parameter.data for _, parameter in sorted(version.named_parameters())])

    def follow_flat(self, flat: Tensor) -> None:
        """The same with a flat vector, which is read again in every step: it may be shared memory.

        Whoever renews it may do so at any time: a step in between moves towards both versions.
        """
        sizes = [own.numel() for own in self._own]
        pieces = torch.split(flat.to(self._own[0].device), sizes)
        self._aim([piece.view(own.shape) for piece, own in zip(pieces, self._own, strict=True)])

    def _aim(self, target: list[Tensor]) -> None:
        if self._target is None:
            torch._foreach_copy_(self._own, target)
        self._target = target

    def move(self) -> Block:
        """One step's part of the way; the block, for this step."""
        if self._target is None:
            return self.block
        if self._target[0].dtype is self._own[0].dtype:
            torch._foreach_lerp_(self._own, self._target, self.part)
        else:
            for own, target in zip(self._own, self._target, strict=True):  # one at a time: no room
                own.lerp_(target.to(own.dtype), self.part)
        return self.block


def frozen_copy(block: Block) -> Block:
    """A forward-only copy: it passes gradients through to its input and keeps none."""
    twin = copy.deepcopy(block)
    twin.requires_grad_(False)
    return twin
