"""A forward-only copy of another block that moves towards the version it follows, a part each step.

A copy that jumps to every new version makes a worker's input, and the loss that it looks ahead to,
another one once a round, and the worker spends the round on getting used to it. Moved by a small
part of the way in each step, copies are slow averages of their block's versions, as the targets of
other methods of delayed learning are. Decides how they move, and how they are held meanwhile; which
version they follow is `coupling`'s business.

A version to move to may be given in half precision, and in a swarm it is: three digits are enough
for something that is a round old. Then the copy is held in half precision too, in full only while
it is read (`at_hand`): a worker reads up to one block less than the model has, and in full they
would be most of its memory. What a step moves is often less than the last digit of a half: it is
rounded up or down by chance, so that on average it moves by the right amount.
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
DROPPED_BITS = 13  # of a float's 23 that a half has no place for
PIECE = 1 << 16  # numbers rounded at once: their chances come from one table
SHIFTS = 4093  # so many places in the table where a piece may begin


class Readable(Protocol):
    """A block, or a copy that is held in less memory until somebody reads it."""

    def at_hand(self, keep: bool = False) -> AbstractContextManager[Block]:
        """The block in full, for as long as the context lasts. `keep` what is changed of it."""


class MovingCopy:
    """It stands still until it has something to follow."""

    def __init__(self, block: Block, steps: float) -> None:
        self.block = frozen_copy(block)
        self.part = 1.0 / steps
        self._parameters = [parameter for _, parameter in sorted(self.block.named_parameters())]
        self._target: list[Tensor] | None = None
        self._chances: Tensor | None = None
        self._rounded = 0  # pieces so far

    @property
    def half(self) -> bool:
        """Whether it is held in half precision."""
        return self._own[0].dtype is HALF

    @property
    def _own(self) -> list[Tensor]:
        return [parameter.data for parameter in self._parameters]

    def follow(self, version: Block) -> None:
        """Move towards the weights of this block from now on. The first time it goes there."""
        self._aim([parameter.data for _, parameter in sorted(version.named_parameters())])

    def follow_flat(self, flat: Tensor) -> None:
        """The same with a flat vector, which is read again in every step: it may be shared memory.

        Whoever renews it may do so at any time: a step in between moves towards both versions.
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
        """One step's part of the way."""
        if self._target is None:
            return
        if not self.half:
            torch._foreach_lerp_(self._own, self._target, self.part)
            return
        for own, target in zip(self._own, self._target, strict=True):
            for place, wanted in _pieces(own, target):  # no room for all of them in full
                place.copy_(self._by_chance(place.float().lerp_(wanted.float(), self.part)))

    @contextmanager
    def at_hand(self, keep: bool = False) -> Iterator[Block]:
        """The block in full precision, for as long as the context lasts."""
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
        """Numbers that a half can hold: the nearer one above or below, by chance, so that the mean
        is right. What is one already stays as it is. Overwrites `full`."""
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
    """Two tensors of the same size, in the same order, a piece of each at a time."""
    ones, others = (torch.split(each.view(-1), PIECE) for each in (one, other))
    return zip(ones, others, strict=True)


def frozen_copy(block: Block) -> Block:
    """A forward-only copy: it passes gradients through to its input and keeps none."""
    twin = copy.deepcopy(block)
    twin.requires_grad_(False)
    return twin
