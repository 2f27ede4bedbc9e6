"""All workers of a run in one process: training without a network.

As in a swarm, workers read other blocks only as copies that are renewed once a round, so the
effect of staleness can be measured on one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from protocol.errors import ModelError
from swarm.learning.coupling import composed_versions, oldest_needed
from swarm.learning.model import Block
from swarm.learning.moving_copy import MovingCopy, frozen_copy
from swarm.learning.worker import BlockWorker, StepLoss
from swarm.run import Run

Weights = dict[str, Tensor]

AHEAD = -1  # as a lag: the newest version, in a separate copy, since with ahead_learns it changes


class Versions:
    """Frozen copies of every block by version. Versions that no worker can read are dropped."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.copies: dict[int, list[Block]] = {}
        self.newest = -1

    def push(self, blocks: Sequence[Block]) -> None:
        """Copy the blocks as the next version."""
        self.newest += 1
        self.copies[self.newest] = [frozen_copy(block) for block in blocks]
        # A run with relay may be composed staggered, however it was trained.
        oldest = oldest_needed(len(blocks), self.newest, staggered=self.run.model.relays)
        for version in [v for v in self.copies if v < oldest]:
            del self.copies[version]

    def get(self, block: int, version: int) -> Block:
        return self.copies[version][block]


class LocalSwarm:
    """One worker per block, trained in lockstep."""

    def __init__(self, run: Run, device: torch.device, autocast: torch.dtype | None = None) -> None:
        self.run = run
        self.workers = [
            BlockWorker(run, block, device, autocast) for block in range(run.model.blocks)
        ]
        self.versions = Versions(run)
        # What workers read, by (block, lag): lag is rounds before the newest version, or AHEAD.
        self.copies = {
            (block, lag): MovingCopy(self.workers[block].block, run.training.copy_steps)
            for worker in self.workers
            for block, lag in self._read_by(worker.index)
        }
        self.steps_done = 0

    def step(self, x: Tensor, y: Tensor, offline: frozenset[int] = frozenset()) -> list[StepLoss]:
        """One step of every worker on the same batch."""
        return self.step_each([(x, y)] * len(self.workers), offline)

    def step_each(
        self, batches: Sequence[tuple[Tensor, Tensor]], offline: frozenset[int] = frozenset()
    ) -> list[StepLoss]:
        """One step of every worker that is not offline, each on its own batch.

        At a round's start the copies are renewed first.
        """
        if self.steps_done % self.run.training.steps_per_round == 0:
            self.versions.push([worker.block for worker in self.workers])
            self._follow_newest()
        for moving in self.copies.values():
            moving.move()
        losses = [
            worker.step(x, y, self._upstream(worker.index), self._next(worker.index))
            for worker, (x, y) in zip(self.workers, batches, strict=True)
            if worker.index not in offline
        ]
        for index in offline:  # the schedule goes on without them
            self.workers[index].steps_done += 1
        self.steps_done += 1
        return losses

    def composed_blocks(self, staggered: bool | None = None) -> list[Block]:
        """The blocks of the assembled model: the last one live, the others as it reads them."""
        live = [worker.block for worker in self.workers]
        if not self.run.model.relays or self.versions.newest < 0:
            return live
        if staggered is None:
            staggered = self.run.training.staggered
        if not staggered:
            return live
        # The live weights are the version after the newest copy.
        numbers = composed_versions(len(live), self.versions.newest + 1, staggered)
        held = [
            self.versions.get(block, min(version, self.versions.newest))
            for block, version in enumerate(numbers[:-1])
        ]
        return [*held, live[-1]]

    def state(self) -> tuple[Weights, dict[str, Any]]:
        """The state for a checkpoint, as named tensors and a few numbers."""
        tensors: Weights = {}
        for worker in self.workers:
            _put(tensors, f"block.{worker.index}", worker.block.state_dict())
            _put(tensors, f"optimizer.{worker.index}", worker.optimizer.tensors())
        for version, blocks in self.versions.copies.items():
            for index, block in enumerate(blocks):
                _put(tensors, f"version.{version}.{index}", block.state_dict())
        for (index, lag), moving in self.copies.items():
            _put(tensors, f"copy.{index}.{lag}", moving.block.state_dict())
        return tensors, {"steps_done": self.steps_done}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """The inverse of `state`. Raises `ModelError` if the tensors are not of this run."""
        try:
            for worker in self.workers:
                worker.block.load_state_dict(_take(tensors, f"block.{worker.index}"))
                worker.optimizer.load(_take(tensors, f"optimizer.{worker.index}"))
                worker.steps_done = numbers["steps_done"]
            self.steps_done = numbers["steps_done"]
            held = sorted({int(k.split(".")[1]) for k in tensors if k.startswith("version.")})
            self.versions.copies, self.versions.newest = {}, max(held, default=-1)
            for version in held:
                self.versions.copies[version] = []
                for worker in self.workers:
                    block = frozen_copy(worker.block)
                    block.load_state_dict(_take(tensors, f"version.{version}.{worker.index}"))
                    self.versions.copies[version].append(block)
            if self.versions.newest >= 0:
                self._follow_newest()
            for (index, lag), moving in self.copies.items():  # part of the way to their versions
                moving.block.load_state_dict(_take(tensors, f"copy.{index}.{lag}"))
            self._check_loaded(tensors)
        except (KeyError, IndexError, TypeError, RuntimeError, ValueError) as error:
            raise ModelError(
                f"the checkpoint does not fit this run: {str(error).splitlines()[0]}",
                "resume with the options the run was started with, or start a new folder",
            ) from error

    def _check_loaded(self, tensors: Mapping[str, Tensor]) -> None:
        steps, newest = self.steps_done, self.versions.newest
        if type(steps) is not int or steps < 0:
            raise ValueError("its number of steps makes no sense")
        if newest != (steps - 1) // self.run.training.steps_per_round:
            raise ValueError("the newest copies of the blocks are missing")
        if self.state()[0].keys() != tensors.keys():
            raise ValueError("it has tensors that the run has not")

    def _read_by(self, block: int) -> list[tuple[int, int]]:
        """(block, lag) of all that a worker reads: those before it, then the next."""
        if not self.run.model.relays:
            return []
        staggered = self.run.training.staggered
        read = [(before, block - 1 - before if staggered else 0) for before in range(block)]
        looks = self.run.model.coupling == "look_ahead" and block + 1 < len(self.workers)
        return [*read, (block + 1, AHEAD)] if looks else read

    def _follow_newest(self) -> None:
        for (block, lag), moving in self.copies.items():
            moving.follow(self.versions.get(block, max(0, self.versions.newest - max(0, lag))))

    def _upstream(self, block: int) -> list[MovingCopy]:
        return [self.copies[read] for read in self._read_by(block) if read[0] < block]

    def _next(self, block: int) -> MovingCopy | None:
        found = [self.copies[read] for read in self._read_by(block) if read[0] > block]
        return found[0] if found else None


def _put(tensors: Weights, prefix: str, part: Mapping[str, Tensor]) -> None:
    tensors.update({f"{prefix}.{name}": value for name, value in part.items()})


def _take(tensors: Mapping[str, Tensor], prefix: str) -> Weights:
    cut = len(prefix) + 1
    return {name[cut:]: v for name, v in tensors.items() if name.startswith(prefix + ".")}
