"""Training that is a walk toward a goal: a stand-in where the swarm is the question."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from node.trainer.trainer import OnProgress, TrainerError
from swarm.consensus.fixed_point import Quanta
from swarm.learning.flat import Change, Floats


class ToyTrainer:
    """In every step the weights go a part of the way to the goal, with noise.

    Does what a host asks of its trainer (`node.trainer.trainer.BlockTrainer`), in this process.
    """

    def __init__(
        self,
        start: Floats,
        goal: Floats,
        numbers: np.random.Generator,
        learning: float,
        noise: float,
        step_s: float,
        on_progress: OnProgress,
    ) -> None:
        self.goal, self.numbers = goal, numbers
        self.learning, self.noise, self.step_s = learning, noise, step_s
        self.weights = start.copy()
        self.learned = np.zeros(len(start))  # all of its steps together
        self.on_progress = on_progress
        self.copies: dict[int, Quanta] = {}  # of other blocks, as they were handed over last
        self.paused = False
        self.steps = 0
        self._start = start
        self._budget = 0
        self._timer: asyncio.TimerHandle | None = None
        self._runs = False

    # Life.

    async def start(self) -> None:
        self.weights, self._runs = self._start.copy(), True

    async def stop(self) -> None:
        self._runs = False
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        if not self._runs:
            raise TrainerError("the training process was stopped")

    # Training.

    async def begin_round(self, step: int, steps: int, rate_factor: float = 1.0) -> None:
        self._check()
        self._budget = steps
        self._go_on()

    async def pause(self, paused: bool) -> None:
        self._check()
        self.paused = paused
        self._go_on()

    def _go_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._budget > 0 and self._runs and not self.paused:
            self._timer = asyncio.get_running_loop().call_later(self.step_s, self._step)

    def _step(self) -> None:
        change = self.learning * (self.goal - self.weights)
        if self.noise:
            change += self.noise * self.numbers.normal(size=len(change))
        after = (self.weights + change).astype(np.float32)
        self.learned += after.astype(np.float64) - self.weights
        self.weights = after
        self._budget -= 1
        self.steps += 1
        self.on_progress({"steps": self.steps, "loss_nats": self._distance(self.weights)})
        self._go_on()

    # The weights.

    def _distance(self, flat: Floats) -> float:
        """Stands for the CE: it falls as the weights come nearer to the goal."""
        return 1.0 + float(np.abs(flat - self.goal).mean())

    async def snapshot(self) -> Floats:
        self._check()
        return self.weights.copy()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Floats]:
        self._check()
        yield self.weights.copy()

    async def correct(self, changes: Sequence[Change]) -> None:
        self._check()
        self.weights = self.weights.copy()
        for change in changes:
            change.add_to(self.weights)

    async def replace(self, flat: Floats) -> None:
        self._check()
        self.weights = flat.copy()

    async def evaluate(self, flat: Floats) -> float:
        self._check()
        return self._distance(flat)

    async def renew_copies(self, copies: Mapping[int, Quanta]) -> None:
        self._check()
        self.copies.update(copies)

    async def save(self, path: Path) -> None:
        self._check()
        await asyncio.to_thread(path.write_bytes, self.weights.tobytes())

    async def load(self, path: Path) -> None:
        self._check()
        data = await asyncio.to_thread(path.read_bytes)
        self.weights = np.frombuffer(data, dtype=np.float32).copy()
