"""A host's work on one block: its training, its replica, the copies of other blocks that it reads.

Decides the order in which these start and stop, and what follows from what the replica tells.
Knows nothing of other blocks to work on, of budgets or of the host's life: see `host`. What a
round is stands in `swarm.rounds.round`; how the training process is kept in `training`; when the
state is written in `saving`; what is served in `node.replica.service`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from node.host.block_choice import credible, fresh
from node.host.event_log import EventLog
from node.host.events import EventWriter
from node.host.first_consensus import first_consensus
from node.host.saving import Saver
from node.host.settings import HostSettings
from node.host.state import HostState
from node.host.training import BlockTraining, MakeTrainer
from node.log.copies import Copies
from node.log.follow import Follower
from node.machine.going_on import going_on
from node.machine.phases import mark
from node.machine.tasks import BackgroundTasks
from node.network.network import Network, NetworkSettings
from node.network.peers import NetworkPeers
from node.network.service import Status
from node.replica.board import ReplicaBoard
from node.replica.canary import CanaryWatch
from node.replica.exchange import ReplicaSettings
from node.replica.replica import Replica
from node.replica.running_weights import Moment
from node.replica.service import serve_replica
from node.serving.trained import TrainedServer
from node.trainer.process import TrainerSettings
from node.trainer.trainer import Trainer, TrainerError
from protocol.errors import BlockswarmError, UsageError, WireError
from protocol.identity import peer_text
from protocol.log import Entry
from swarm.consensus.log import ConsensusLog
from swarm.consensus.updates import UpdateCodec
from swarm.events import LogEvent
from swarm.learning.flat import flat_size, initial_flat
from swarm.learning.worker import initial_block
from swarm.rounds import actions as act
from swarm.rounds.clock import round_at
from swarm.rounds.state import MAX_GROUP, RoundRules
from swarm.runfile import RunFile

_log = logging.getLogger(__name__)

LOCAL_CE_EVERY = 4  # rounds; the CE of the consensus is measured whenever the canary has time
LEAVE_SAVE_S = 2.0  # leaving takes 5 s at most; what was saved before is whole


class NoteEvent(Protocol):
    """Write an event of the node into the log."""

    def __call__(
        self, what: str, detail: str = "", facts: Mapping[str, str] | None = None
    ) -> None: ...


@dataclass(frozen=True)
class HostParts:
    """What a host is built of. A simulated host (`node.simulator`) is built of others."""

    network: Callable[[NetworkSettings, Callable[[], Status], Callable[[str], None]], Network]
    trainer: MakeTrainer
    replica: type[Replica]
    events: Callable[[Path, Callable[[str], None]], EventLog]
    saver: type[Saver]
    numbers: random.Random


def live_parts() -> HostParts:
    return HostParts(Network, Trainer, Replica, EventLog, Saver, random.Random())


@dataclass(frozen=True)
class Premises:
    """What a host has, whichever block it works on."""

    settings: HostSettings
    parts: HostParts
    run_file: RunFile
    run_id: bytes
    rules: RoundRules
    network: Network
    events: EventLog
    writer: EventWriter
    saver: Saver
    served: TrainedServer | None  # None: it does not answer sweeps
    role: int
    now_s: Callable[[], float]  # the swarm's time
    note: NoteEvent
    say: Callable[[str], None]
    round_began: Callable[[int], None]


class BlockWork:
    """The work on `block`, from `run` until it is cancelled. It is its replica's `Listener`."""

    def __init__(self, premises: Premises, block: int, paused: bool) -> None:
        self.premises, self.block, self.paused = premises, block, paused
        self.run_file = premises.run_file
        self.run_spec = premises.run_file.run
        self.writer, self.saver, self.served = premises.writer, premises.saver, premises.served
        self.network, self.say, self.now_s = premises.network, premises.say, premises.now_s
        # A lost trainer is for `training` to see to, and no failure of the task that met it.
        self._tasks = BackgroundTasks(_log, "a task of the host failed", (TrainerError,))
        self.peers = NetworkPeers(self.network)
        self.training = self._new_training()
        exchange = self.run_file.exchange
        size = flat_size(initial_block(self.run_spec, block))
        self.codec = UpdateCodec(self.run_file.codecs, size)
        self.board = ReplicaBoard(
            self.network,
            self.peers,
            block,
            premises.role,
            self._on_record,
            premises.rules.period_s / 2,
        )
        self.replica = premises.parts.replica(
            ReplicaSettings(
                premises.run_id,
                block,
                premises.rules,
                self.codec,
                exchange.snapshot_every,
                self.run_file.data.same_text,
            ),
            self.network.identity,
            initial_flat(self.run_spec, block),
            self.peers,
            self.board,
            self.training.trainer,
            self.now_s,
            self,
        )
        self.copies = Copies(
            self.run_file,
            premises.run_id,
            block,
            self.peers,
            self._donors,
            self.now_s,
            self.training.trainer.renew_copies,
        )
        self.canary = CanaryWatch(
            self.replica,
            self.training.trainer.evaluate,
            judges=self.run_file.data.same_text,
            clock=asyncio.get_running_loop().time,
        )
        self.ended = False
        self._began_round: int | None = None
        self._local_ce_due = 0  # the round from which on it is measured again
        self._said_crowded = False

    @property
    def rounds_here(self) -> int:
        began = self._began_round
        return 0 if began is None else self.replica.state.round - began

    # Life.

    async def run(self, saved: HostState | None, followers: Mapping[int, Follower]) -> None:
        """Until cancelled. `followers`: the copies that this host had in another block's work."""
        loops: list[asyncio.Task[None]] = []
        try:
            await self._begin(saved, followers)
            replica, trainer = self.replica, self.training.trainer
            loops = [
                asyncio.create_task(replica.running.queue.run()),
                asyncio.create_task(replica.run()),
                asyncio.create_task(self.copies.run()),
                asyncio.create_task(self._discover()),
                asyncio.create_task(self.saver.run(replica, trainer, self.block)),
                asyncio.create_task(self.training.keep(replica, self.copies)),
            ]
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self._end(loops)

    async def _begin(self, saved: HostState | None, followers: Mapping[int, Follower]) -> None:
        self.writer.block = self.block
        self.say(f"block {self.block} of {self.run_spec.model.blocks}")
        mark("block")
        rules = self.premises.rules
        number = round_at(self.now_s(), rules.start_s, rules.period_s)
        self.copies.adopt(followers)
        self.network.standings.works_on(self.block, self._log_of)
        copies = asyncio.create_task(self.copies.catch_up(number))  # beside the slow start below
        try:
            await self.training.start(self.paused)
            mark("trainer")
            if saved is not None:
                await self.saver.resume(
                    saved,
                    self.replica,
                    self.training.trainer,
                    self.codec,
                    self.run_file.exchange.snapshot_every,
                )
            if self.replica.state.log.head.round < 0 < number:
                await self._go_on_from_the_newest(number, followers)
            await copies
        finally:
            copies.cancel()
        await self.training.trainer.renew_copies(self.copies.weights())
        serve_replica(
            self.network.service,
            self.replica,
            self.board.answer,
            self.network.clock,
            self.copies.held,
        )
        self._offer(self.replica.state.log.head.round)
        self._began_round = self.replica.state.round
        self.round_began(self.replica.state.round)
        head = self.replica.state.log.head
        begun_with = {"round": str(head.round), "consensus": head.digest.hex()}
        self.premises.note("resumed" if saved else "started", facts=begun_with)

    async def _go_on_from_the_newest(self, number: int, followers: Mapping[int, Follower]) -> None:
        found = await first_consensus(
            self.network, self.peers, self.run_file, self.block, number, followers
        )
        if found.round >= 0:
            self.say(f"block {self.block}: going on from the consensus of round {found.round}")
            consensus = await asyncio.to_thread(found.consensus.whole, found.log)
            self.replica.restore(Moment(found.log, consensus, {}))
            self.replica.reset_weights()
            self.saver.due.set()  # with it we can go on alone, if all others are gone tomorrow

    async def _end(self, loops: Sequence[asyncio.Task[None]]) -> None:
        """Stop hearing, save, stop the training."""
        await self._tasks.cancel(*loops[1:])
        if loops:
            # The queue of the weights is still at work: save through it.
            with suppress(BlockswarmError, TimeoutError):
                async with asyncio.timeout(LEAVE_SAVE_S):
                    await self.saver.save(self.replica, self.training.trainer, self.block)
            loops[0].cancel()
            await asyncio.gather(loops[0], return_exceptions=True)
        await self.training.trainer.stop()

    # The training.

    def _new_training(self) -> BlockTraining:
        settings = self.premises.settings
        spec = settings.data_spec or self.run_file.data.spec
        if spec == "own":
            raise UsageError("in this run every host brings its own text", "give --data PATH")
        trainer = TrainerSettings(
            self.run_spec.to_dict(),
            self.block,
            spec,
            self.writer.me,
            settings.device,
            settings.threads,
            self.run_file.data.sha256,
        )
        return BlockTraining(
            self.premises.parts.trainer,
            trainer,
            self.run_file,
            self.writer.measured,
            self.premises.note,
            self.say,
            self._tasks.spawn,
        )

    def weights_lost(self, why: str) -> None:
        self.training.lost(why)

    def pause(self, paused: bool) -> None:
        self.training.pause(paused)

    def mute(self, muted: bool) -> None:
        """Train on, exchange nothing; or exchange again."""
        self.replica.muted = self.copies.muted = muted

    # What the replica says: see `node.replica.replica.Listener`.

    def round_began(self, number: int) -> None:
        self.premises.round_began(number)
        if self.premises.rules.ended(number):
            self._end_run()
            return
        self.training.give_steps(self.replica)
        self.copies.begin(number)

    def _end_run(self) -> None:
        """The last exchange is over: no more training, and the consensus stays here to be had."""
        if not self.ended:
            self.ended = True
            self.copies.muted = True  # nothing reads them any more
            self.say("the run has ended; its consensus is served as long as this host runs")
            self.premises.note("run_ended", f"after {self.run_file.rounds.count} rounds")

    def reported(self, report: act.RoundReport, update_bytes: int) -> None:
        ages = self.copies.ages(report.round)
        log = self.replica.state.log
        self._log(self.writer.round(self.now_s(), report, log, update_bytes, ages))
        if report.outcome != "decided":
            self.saver.due.set()

    def stepped(self, entry: Entry) -> None:
        self._offer(entry.round)
        self.saver.due.set()
        self._tasks.spawn(self._evaluate(entry.round))

    def moved(self, move: act.MoveTo, before: bytes) -> None:
        number = self.replica.state.round
        self._log(self.writer.move(self.now_s(), number, move, before))
        self._offer(move.head.round)
        self.saver.due.set()

    def excluded(self, peer: str, until_round: int, reason: str) -> None:
        number = self.replica.state.round
        self._log(self.writer.exclusion(self.now_s(), number, peer, until_round, reason))

    def crowded(self) -> None:
        if not self._said_crowded:
            self.say(
                f"block {self.block} has more than {MAX_GROUP} hosts; this one exchanges with "
                f"{MAX_GROUP - 1} of them"
            )
        self._said_crowded = True

    def _log(self, event: LogEvent) -> None:
        self.premises.events.write(event)

    def _offer(self, round_: int) -> None:
        """Serve the consensus as it is now, that of a round."""
        if self.served is not None:
            self.served.offer(self.block, round_, self.replica.weights_at)

    async def _evaluate(self, number: int) -> None:
        """CE of the consensus, now and then of the running weights; after a step, if it is time."""
        trainer, measured = self.training.trainer, self.writer.measured
        found = await self.canary.look()
        if found is None:
            return
        measured.consensus_ce_nats = measured.newest_ce_nats = found
        if number >= self._local_ce_due:
            self._local_ce_due = number + LOCAL_CE_EVERY
            running = await trainer.snapshot()
            measured.local_ce_nats = await trainer.evaluate(running)
            measured.newest_own_ce_nats = measured.local_ce_nats

    # What others say.

    def _on_record(self, event: act.PeerRecord) -> None:
        self.replica.hear(event)

    def _log_of(self, block: int) -> ConsensusLog | None:
        """The log of our block, or of one that we follow."""
        if block == self.block:
            return self.replica.state.log
        held = self.copies.held(block)
        return None if held is None else held[0]

    async def _donors(self, block: int) -> Sequence[str]:
        """Whom to ask for another block's log: in the order of the lookup, which no claim changes.

        The round in a record is such a claim. It only tells who has not been here for a while.
        """
        rules = self.premises.rules
        number = round_at(self.now_s(), rules.start_s, rules.period_s)
        found = await self.network.replicas(block, cap=8)
        usable = [s for s in found if credible(s.record, number)]
        usable.sort(key=lambda s: not fresh(s.record, number))
        return [peer_text(s.peer_id) for s in usable if s.peer_id != self.network.peer_id]

    async def _discover(self) -> None:
        """Look the block's replicas up: often while alone, else now and then.

        A newcomer shows itself to those whom it finds, so that replicas who know each other need
        the DHT for one thing: to meet again after the network was parted.
        """
        period_s = self.premises.rules.period_s
        while True:
            with going_on(_log, "looking for replicas", WireError):
                await self.board.look_up()
            often_s, seldom_s = min(period_s / 2, 15.0), min(3 * period_s, 60.0)
            await asyncio.sleep(seldom_s if self.board.has_company else often_s)
