"""When a host's state is written, and what happens if it cannot be.

Decides that it is saved after every round (kill -9 loses at most the running one) unless that takes
more than a quarter of the time, and that a full disk or a folder of somebody else's is said once
and stops nobody. The files are `state`'s, the moment is `node.replica.replica`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from node.host.state import DamagedState, HostState, StateError, StateFolder
from node.machine.atomic import remove_halves
from node.replica.replica import Replica
from node.replica.running_weights import Moment
from node.trainer.trainer import BlockTrainer, TrainerError
from protocol.errors import BlockswarmError, WireError
from swarm.consensus.updates import UpdateCodec

_log = logging.getLogger(__name__)

SAVING_SHARE = 4  # at most a quarter of the time goes into saving


class Saver:
    """Saves one host's state. `tell` hears (what, detail) when it cannot, `say` a sentence."""

    def __init__(
        self,
        folder: Path,
        run_id: bytes,
        tell: Callable[[str, str], None],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.run_id = StateFolder(folder), run_id
        self.tell, self.say = tell, say
        self.due = asyncio.Event()
        self._in_trouble = False

    def load(self) -> HostState | None:
        """What was saved before, and no half-written rest of it."""
        try:
            saved = self.folder.load(self.run_id)
        except DamagedState as error:
            self.say(f"{error.message}; catching up from the swarm instead")
            saved = None
        remove_halves(self.folder.folder)
        self.folder.remove_unnamed()
        return saved

    async def resume(
        self,
        saved: HostState,
        replica: Replica,
        trainer: BlockTrainer,
        codec: UpdateCodec,
        snapshot_every: int,
    ) -> None:
        """Go on from there; with what cannot be used of it the replica begins as a newcomer."""
        try:
            moment = await asyncio.to_thread(saved.restore, codec, snapshot_every, replica.me)
        except (WireError, StateError) as error:
            self.say(f"the saved state cannot be used ({error.message}); catching up instead")
            return
        try:
            await trainer.load(saved.trainer_path)
        except TrainerError as error:
            self.say(f"the saved weights cannot be used ({error.message}); using the consensus")
            replica.restore(moment)
            replica.running.reset(moment.log, moment.consensus)
            return
        replica.restore(moment)

    async def run(self, replica: Replica, trainer: BlockTrainer, block: int) -> None:
        """Save whenever it is due, until cancelled."""
        while True:
            await self.due.wait()
            self.due.clear()
            now_s = asyncio.get_running_loop().time
            began_s = now_s()
            try:
                await self.save(replica, trainer, block)
                self._in_trouble = False
            except StateError as error:  # a moment without a snapshot: the next one has it
                _log.debug("not saved: %s", error)
            except BlockswarmError as error:
                if not replica.running.queue.lost:
                    self._cannot(error)
            await asyncio.sleep((SAVING_SHARE - 1) * (now_s() - began_s))

    def _cannot(self, error: BlockswarmError) -> None:
        if not self._in_trouble:
            self.tell("disk_full" if "full" in error.message else "cannot_save", error.message)
            self.say(f"{error.message}; training goes on without saving")
        self._in_trouble = True

    async def save(self, replica: Replica, trainer: BlockTrainer, block: int) -> None:
        """All parts of one moment: the trainer's in the queue's turn, then the rest of it."""
        path = self.folder.trainer_path()
        moments: list[Moment] = []

        async def save_trainer(moment: Moment) -> None:
            await trainer.save(path)
            moments.append(moment)

        try:
            await replica.at_rest(save_trainer)
        except BaseException:
            self.folder.give_up(path)
            raise
        await asyncio.to_thread(self.folder.save, self.run_id, block, moments[0], path)
