"""Forward-only copies of other blocks, as moving averages of their versions.

A copy that jumps to every new version changes a worker's input, and the loss that it looks ahead
to, once a round, and the worker spends the round adapting to it. So a copy moves a small part of
the way to the version it follows in each step, as slowly moving target networks do. Which version
that is, is `coupling`'s part.

In a swarm versions are given in half precision: three digits are enough for weights that are a
round old. Then the copy is held in half precision too, in full only while it is read (`at_hand`): a
worker may read all other blocks, and in full they would be most of its memory. A step often moves
less than the last digit of a half, so it is rounded stochastically and moves by the right amount on
average.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from swarm.learning.model import Block

HALF = torch.float16
DROPPED_BITS = 13  # of the 23 mantissa bits of a float, those that a half does not have
PIECE = 1 << 16  # numbers rounded at once, with random bits from one table
SHIFTS = 4093  # number of offsets in the table at which a piece may begin


class Readable(Protocol):
    """A block, or a copy of one that may be held in half precision."""

    def at_hand(self, keep: bool = False) -> AbstractContextManager[Block]:
        """The block in full precision while the context lasts. `keep`: keep changes made to it."""


class MovingCopy:
    """Moving average of another block's versions. Does not move before the first `follow`."""

    def __init__(self, block: Block, steps: float) -> None:
        self.block = frozen_copy(block)
        self.part = 1.0 / steps
        self._parameters = [parameter for _, parameter in sorted(self.block.named_parameters())]
        self._target: list[Tensor] | None = None
        self._chances: Tensor | None = None
        self._rounded = 0  # pieces so far

    @property
    def half(self) -> bool:
        """Whether the copy is held in half precision."""
        return self._own[0].dtype is HALF

    @property
    def _own(self) -> list[Tensor]:
        return [parameter.data for parameter in self._parameters]

    def follow(self, version: Block) -> None:
        """Move towards the weights of `version` from now on; the first time, take them."""
        self._aim([parameter.data for _, parameter in sorted(version.named_parameters())])

    def follow_flat(self, flat: Tensor) -> None:
        """The same with a flat vector, which is read in every step and may be in shared memory.

        It may be overwritten at any time: a step meanwhile moves towards a mix of both versions.
        """
        own = self._own
        pieces = torch.split(flat.to(own[0].device), [held.numel() for held in own])
        self._aim([piece.view(held.shape) for piece, held in zip(pieces, own, strict=True)])

    def _aim(self, target: list[Tensor]) -> None:
        if self._target is None:
            for parameter, version in zip(self._parameters, target, strict=True):
                if version.dtype is HALF:
                    parameter.data = version.clone()
                else:
                    parameter.data.copy_(version)
        self._target = target

    def move(self) -> None:
        """Move 1 / steps of the way to the followed version."""
        if self._target is None:
            return
        if not self.half:
            torch._foreach_lerp_(self._own, self._target, self.part)
            return
        for own, target in zip(self._own, self._target, strict=True):
            for place, wanted in _pieces(own, target):  # in pieces, to save memory
                place.copy_(self._by_chance(place.float().lerp_(wanted.float(), self.part)))

    @contextmanager
    def at_hand(self, keep: bool = False) -> Iterator[Block]:
        """The block in full precision while the context lasts. `keep`: keep changes made to it."""
        if not self.half:
            yield self.block
            return
        held = self._own
        for parameter in self._parameters:
            parameter.data = parameter.data.float()
        try:
            yield self.block
        finally:
            for parameter, own in zip(self._parameters, held, strict=True):
                for place, full in _pieces(own, parameter.data) if keep else ():
                    place.copy_(self._by_chance(full))
                parameter.data = own

    def _by_chance(self, full: Tensor) -> Tensor:
        """Round stochastically to numbers that a half can hold, without bias. Overwrites `full`."""
        if self._chances is None:
            generator = torch.Generator().manual_seed(0)
            size, below = (PIECE + SHIFTS,), 1 << DROPPED_BITS
            table = torch.randint(0, below, size, dtype=torch.int32, generator=generator)
            self._chances = table.to(full.device)
        start = self._rounded * 2749 % SHIFTS
        self._rounded += 1
        bits = full.view(torch.int32)  # sign and magnitude: adding to them moves away from 0
        bits += self._chances[start : start + len(full)]
        bits &= -1 << DROPPED_BITS
        return full


def _pieces(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Matching pieces of two tensors of the same size."""
    ones, others = (torch.split(each.view(-1), PIECE) for each in (one, other))
    return zip(ones, others, strict=True)


def frozen_copy(block: Block) -> Block:
    """A copy with frozen weights; gradients still flow through it to its input."""
    twin = copy.deepcopy(block)
    twin.requires_grad_(False)
    return twin
