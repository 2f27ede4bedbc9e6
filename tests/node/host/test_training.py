"""A training process that was lost: the next one takes no step before its weights are set."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from node.host.events import Measured
from node.host.training import BlockTraining
from node.trainer.process import TrainerSettings
from node.trainer.trainer import Trainer
from node.trainer.weights_queue import WeightsQueue
from swarm.consensus.fixed_point import to_fixed
from swarm.learning.flat import Floats, initial_flat
from tests.support.live import tiny_run_file


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110  # a process of its own, which knows no event of ours
        await asyncio.sleep(0.01)


def test_a_new_process_takes_no_step_before_it_has_its_weights() -> None:
    file = tiny_run_file(blocks=2, coupling="look_ahead")
    first = initial_flat(file.run, 0)
    consensus = first + np.float32(0.125)
    told: list[str] = []
    found: list[Floats] = []

    async def check() -> None:
        settings = TrainerSettings(file.run.to_dict(), 0, "python", "host", "cpu", threads=1)
        measured = Measured()
        training = BlockTraining(
            Trainer,
            settings,
            file,
            measured,
            lambda what, detail: told.append(what),
            lambda text: None,
            run,
        )
        trainer, queue = training.trainer, WeightsQueue(training.lost)

        async def reset() -> None:
            found.append(await trainer.snapshot())
            await trainer.replace(consensus)
            found.append(await trainer.snapshot())

        replica: Any = SimpleNamespace(
            state=SimpleNamespace(round=0, log=SimpleNamespace(replicas=lambda: 1.0)),
            running=SimpleNamespace(queue=queue),
            reset_weights=lambda: queue.put_reset(reset),
        )
        copies: Any = SimpleNamespace(weights=lambda: {1: to_fixed(initial_flat(file.run, 1))})
        await training.start(paused=False)
        loops = [
            asyncio.create_task(queue.run()),
            asyncio.create_task(training.keep(replica, copies)),
        ]
        try:
            training.give_steps(replica)
            await until(lambda: measured.steps > 0)
            assert trainer.pid is not None
            os.kill(trainer.pid, signal.SIGKILL)
            # Rounds go on while it starts.
            while "trainer_restarted" not in told:
                training.give_steps(replica)
                await asyncio.sleep(0.05)
            await until(lambda: len(found) == 2)
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await trainer.stop()

    def run(work: Any) -> None:
        tasks.append(asyncio.ensure_future(work))

    tasks: list[asyncio.Future[None]] = []
    asyncio.run(asyncio.wait_for(check(), 120))
    assert np.array_equal(found[0], first)
    assert np.array_equal(found[1], consensus)
