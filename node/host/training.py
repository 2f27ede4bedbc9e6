"""The training of a host's block: its process, started again when it died, and its steps.

Decides which steps of the schedule a round may do, and that a lost process comes back with the
consensus, its copies and its pause. What the process does is `node.trainer.process`'s, what is done
to its weights `node.replica.running_weights`'.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from node.host.events import Measured
from node.log.copies import Copies
from node.network.gate import Backoff
from node.replica.replica import Replica
from node.trainer.process import TrainerSettings
from node.trainer.trainer import BlockTrainer, OnDeath, OnProgress, TrainerError
from swarm.runfile import RunFile

_log = logging.getLogger(__name__)


MakeTrainer = Callable[[TrainerSettings, OnProgress, OnDeath], BlockTrainer]


class BlockTraining:
    """One block's training. `tell` writes an event, `say` tells a person, `spawn` runs a task."""

    def __init__(
        self,
        make: MakeTrainer,
        settings: TrainerSettings,
        run_file: RunFile,
        measured: Measured,
        tell: Callable[[str, str], None],
        say: Callable[[str], None],
        spawn: Callable[[Awaitable[None]], None],
    ) -> None:
        self.run_file, self.measured = run_file, measured
        self.tell, self.say, self.spawn = tell, say, spawn
        self.trainer = make(settings, measured.hear_progress, self._died)
        self.paused = False
        self._replica: Replica | None = None
        self._lost = asyncio.Event()

    async def start(self, paused: bool) -> None:
        """Raises `TrainerError`, with what to do about it."""
        self.paused = paused
        self.measured.new_process()
        await self.trainer.start()
        if paused:
            await self.trainer.pause(True)

    def give_steps(self, replica: Replica) -> None:
        """The process may do the steps of the replica's round; after the run's last there are none.

        In turn with all else that is done to the weights: a new process has others until then.
        """
        number = replica.state.round

        async def give() -> None:
            training = self.run_file.run.training
            await self.trainer.begin_round(
                number * training.steps_per_round,
                training.steps_per_round,
                training.rate_factor(replica.state.log.replicas()),
            )

        if 0 <= number < self.run_file.rounds.count:
            replica.running.queue.put(give)

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self.spawn(self.trainer.pause(paused))

    def _died(self) -> None:
        """Nothing may reach a new process before its weights are set."""
        if self._replica is not None:
            self._replica.running.queue.lose("the training process died")

    def lost(self, why: str) -> None:
        """The weights of the process are not what they should be."""
        if not self._lost.is_set():
            _log.info("%s; starting the training process again", why)
        self._lost.set()

    async def keep(self, replica: Replica, copies: Copies) -> None:
        """Start the process again whenever it died: from the consensus, which we hold."""
        self._replica = replica
        backoff, attempt, said = Backoff(first_s=0.5, most_s=30.0), 0, False
        while True:
            await self._lost.wait()
            self.say("the training process was lost; starting it again")
            await self.trainer.stop()
            try:
                await self.start(self.paused)
                await self.trainer.renew_copies(copies.weights())
            except TrainerError as error:
                if not said:
                    self.say(error.message)
                said = True
                await asyncio.sleep(backoff.wait_s(attempt, random.Random()))
                attempt += 1
                continue
            attempt = 0
            self._lost.clear()  # what failed until now failed with the old process
            self.tell("trainer_restarted", "")
            replica.reset_weights()
            self.give_steps(replica)
