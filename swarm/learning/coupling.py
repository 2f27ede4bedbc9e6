"""Which blocks a worker reads, in which versions, and which versions compose into one model.

Version v of a block is its weights at the start of round v; version 0 is its initialisation. In
round r the worker of block b trains on forward-only copies of the blocks before it. All at version
r, they form a chain that no block was trained on, since block b-1 at r was trained on block b-2 at
r-1. Staggered, block b-1 is read at r, block b-2 at r-1 and so on: each copy reads the version that
it was trained with. Only numbers of versions here; weights are `moving_copy`'s.
"""

from __future__ import annotations

from swarm.run import ModelShape


def followed_blocks(shape: ModelShape, block: int) -> tuple[int, ...]:
    """The blocks that a worker reads: with relay those before it, with look-ahead also the next."""
    before = tuple(range(block)) if shape.relays else ()
    ahead = shape.coupling == "look_ahead" and block + 1 < shape.blocks
    return (*before, block + 1) if ahead else before


def upstream_versions(block: int, round_: int, staggered: bool) -> list[int]:
    """The version of each block before `block` that its worker reads in `round_`."""
    if not staggered:
        return [round_] * block
    return [max(0, round_ - (block - 1 - before)) for before in range(block)]


def composed_versions(blocks: int, newest: int, staggered: bool) -> list[int]:
    """The version of each block in a model assembled when `newest` is the latest version.

    Staggered, the last block is the newest, and the others are as its worker read them last.
    """
    if not staggered:
        return [newest] * blocks
    return [max(0, newest - (blocks - 1 - block)) for block in range(blocks)]


def oldest_needed(blocks: int, round_: int, staggered: bool) -> int:
    """The oldest version that any worker of `round_`, or an assembly after it, may still read."""
    return max(0, round_ - blocks + 1) if staggered else round_
