"""A host in a run: network, trainer, one replica, and the copies of other blocks that it reads.

Decides the order in which they start and stop, when the trainer gets its next round, that a dead
trainer is started again. What a round is stands in `swarm.round`; when the state is written in
`saving`; what is served in `replica_service`; what a person sees, through the events, is the
caller's.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from node.atomic import StorageError
from node.block_choice import choose_block
from node.board import ReplicaBoard
from node.budget import DailyBudget
from node.copies import Copies
from node.discovery import parse_seeds
from node.event_log import EventLog
from node.exchange import ReplicaSettings
from node.gate import Backoff
from node.host_events import EventWriter
from node.host_state import HostState
from node.network import Network, NetworkPeers, NetworkSettings, NobodyThere
from node.replica import Replica
from node.replica_service import serve_replica
from node.saving import Saver
from node.service import Status
from node.trainer import Trainer, TrainerError
from node.trainer_process import TrainerSettings
from protocol import messages
from protocol.errors import BlockswarmError, UsageError, WireError
from protocol.identity import peer_text
from protocol.messages import Message
from protocol.records import Role
from swarm import actions as act
from swarm.aggregate import to_float
from swarm.clock import ClockSample, RunClock
from swarm.flat import flat_size, initial_flat
from swarm.groups import MAX_GROUP
from swarm.log import Entry
from swarm.runfile import RunFile, parse, run_id, scheduled_steps
from swarm.updates import UpdateCodec
from swarm.worker import initial_block

M = TypeVar("M", bound=Message)
_log = logging.getLogger(__name__)

EVALUATE_EVERY = 4  # rounds; an evaluation costs as much as some steps
SAVING_SHARE = 10  # at most a tenth of the time goes into saving
CLOCK_EVERY_ROUNDS = 8
CLOCKS_KEPT = 64
LEAVE_SAVE_S = 2.0  # leaving takes 5 s at most; what was saved before is whole


@dataclass(frozen=True)
class HostSettings:
    """What a person decides about a host."""

    network: NetworkSettings
    folder: Path
    data_spec: str | None = None  # None: what the run says
    block: int | None = None  # None: the neediest one
    device: str = "auto"
    threads: int | None = None
    memory_bytes: int = 1 << 60
    seed: bool = False  # announce ourselves as a peer to join through
    bytes_per_day: int | None = None  # both ways; beyond it the host trains on and moves no bulk


class Host:
    """One host. `run` takes part until it is cancelled. It is its replica's `Listener`."""

    replica_type: type[Replica] = Replica

    def __init__(self, settings: HostSettings, say: Callable[[str], None]) -> None:
        self.settings, self.say = settings, say
        self.run_file: RunFile = parse(settings.network.run_file)
        self.run_id = run_id(settings.network.run_file)
        self.run_spec = self.run_file.run
        if not self.run_file.started:
            raise UsageError("this run has not started", "start it with: blockswarm seed run.toml")
        self.saver = Saver(settings.folder, self.run_id, self._write_node_event, say)
        self.network = Network(settings.network, self._status, say)
        self.me = peer_text(self.network.peer_id)
        self.events = EventLog(settings.folder, say)
        self.writer = EventWriter(self.me, self.network.ledger)
        self.clock = RunClock()
        self.block = -1
        self.replica: Replica | None = None
        self.trainer: Trainer | None = None
        self.copies: Copies | None = None
        self.budget = DailyBudget(settings.bytes_per_day)
        self.paused = False
        self._lost_trainer = asyncio.Event()
        self._trouble: set[str] = set()  # what was said already
        self._tasks: set[asyncio.Task[None]] = set()

    # Time.

    def now_s(self) -> float:
        return self.clock.run_time_s(time.time())

    def _status(self) -> Status:
        replica = self.replica
        if replica is None:
            return Status(self._role(), 0, ())
        return Status(self._role(), max(replica.state.round, 0), (self.block,))

    def _role(self) -> int:
        return int(Role.REPLICA | (Role.SEED if self.settings.seed else 0))

    # Life.

    async def run(self) -> None:
        saved = self.saver.load()
        await self._connect(resumes=saved is not None)
        loops: list[asyncio.Task[None]] = []
        try:
            replica = await self._begin(saved)
            assert self.copies is not None and self.trainer is not None
            loops = [
                asyncio.create_task(replica.running.queue.run()),
                asyncio.create_task(replica.run()),
                asyncio.create_task(self.copies.run()),
                asyncio.create_task(self._discover()),
                asyncio.create_task(self.saver.run(replica, self.trainer, self.block)),
                asyncio.create_task(self._keep_trainer()),
            ]
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            await self._leave(loops)

    async def _connect(self, resumes: bool) -> None:
        """Start the network. Whoever has been here before goes on alone if nobody answers."""
        try:
            await self.network.start()
        except NobodyThere:
            if not resumes and not self.settings.seed:
                raise
            self.say("no peer answers; going on alone and trying to join again")
            known = self.network.discovery.book.latest(256)
            alone = replace(self.settings.network, join=(), state_folder=None)
            self.network = Network(alone, self._status, self.say)
            self.writer.ledger = self.network.ledger
            await self.network.start()
            for peer, addresses in reversed(known):  # through whom it tries again
                self.network.discovery.book.remember(peer, addresses)
            for peer, addresses in parse_seeds(self.settings.network.join).items():
                self.network.discovery.book.remember(peer, addresses)

    async def _begin(self, saved: HostState | None) -> Replica:
        self.block = (
            saved.block
            if saved
            else await choose_block(
                self.network, self.run_file, self.settings.block, self.settings.memory_bytes
            )
        )
        self.writer.block = self.block
        self.say(f"block {self.block} of {self.run_spec.model.blocks}")
        await self._sample_clocks()
        self.trainer = self._new_trainer()
        await self.trainer.start()
        peers = NetworkPeers(self.network)
        rounds, exchange = self.run_file.rounds, self.run_file.exchange
        self.board = ReplicaBoard(
            self.network, peers, self.block, self._role(), self._on_record, rounds.period_s / 2
        )
        codec = UpdateCodec(exchange.codec, flat_size(initial_block(self.run_spec, self.block)))
        self.replica = self.replica_type(
            ReplicaSettings(
                self.run_id, self.block, rounds.rules(), codec, exchange.snapshot_every
            ),
            self.network.identity,
            initial_flat(self.run_spec, self.block),
            peers,
            self.board,
            self.trainer,
            self.now_s,
            self,
        )
        if saved is not None:
            await self.saver.resume(
                saved, self.replica, self.trainer, codec, exchange.snapshot_every
            )
        self.copies = Copies(
            self.run_file,
            self.run_id,
            self.block,
            peers,
            self._donors,
            self.now_s,
            self.trainer.renew_copies,
        )
        serve_replica(
            self.network.service, self.replica, self.board.hear, self.board.known, time.time
        )
        self.round_began(self.replica.state.round)
        self._write_node_event("resumed" if saved else "started")
        return self.replica

    async def _leave(self, loops: Sequence[asyncio.Task[None]]) -> None:
        """Stop hearing, save, stop the trainer, then the network: within 5 s in all."""
        others = [*loops[1:], *self._tasks]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if (
            loops and self.replica and self.trainer
        ):  # the queue of the weights is still at work: save through it
            with suppress(BlockswarmError, TimeoutError):
                async with asyncio.timeout(LEAVE_SAVE_S):
                    await self.saver.save(self.replica, self.trainer, self.block)
            loops[0].cancel()
            await asyncio.gather(loops[0], return_exceptions=True)
        if self.trainer is not None:
            await self.trainer.stop()
        self._write_node_event("left")
        try:
            await self.network.stop()
        except StorageError as error:
            self._say_once("storage", error.message)

    # The trainer.

    def _new_trainer(self) -> Trainer:
        spec = self.settings.data_spec or self.run_file.data.spec
        if spec == "own":
            raise UsageError("in this run every host brings its own text", "give --data PATH")
        settings = TrainerSettings(
            self.run_spec.to_dict(),
            self.block,
            spec,
            self.me,
            self.settings.device,
            self.settings.threads,
        )
        return Trainer(settings, self.writer.measured.hear_progress, self._on_trainer_death)

    def _on_trainer_death(self) -> None:
        """Nothing may reach a new process before its weights are set."""
        if self.replica is not None:
            self.replica.running.queue.lose("the training process died")

    def weights_lost(self, why: str) -> None:
        if not self._lost_trainer.is_set():
            _log.info("%s; starting the training process again", why)
        self._lost_trainer.set()

    async def _keep_trainer(self) -> None:
        """Start the training process again when it died: from the consensus, which we hold."""
        backoff, attempt = Backoff(first_s=0.5, most_s=30.0), 0
        replica, trainer, copies = self.replica, self.trainer, self.copies
        assert replica is not None and trainer is not None and copies is not None
        while True:
            await self._lost_trainer.wait()
            self.say("the training process was lost; starting it again")
            await trainer.stop()
            try:
                await trainer.start()
                await trainer.renew_copies(copies.weights())
                await trainer.pause(self.paused)
            except TrainerError as error:
                self._say_once("trainer", error.message)
                await asyncio.sleep(backoff.wait_s(attempt, random.Random()))
                attempt += 1
                continue
            attempt = 0
            self._lost_trainer.clear()  # what failed until now failed with the old process
            self._write_node_event("trainer_restarted")
            replica.reset_weights()
            self._give_steps(replica.state.round)

    def _give_steps(self, number: int) -> None:
        """The trainer may do the steps of a round."""
        if 0 <= number < self.run_file.rounds.count:
            training, trainer = self.run_spec.training, self.trainer
            assert trainer is not None
            first = scheduled_steps(training, number)
            self._spawn(trainer.begin_round(first, training.steps_in_round(number)))

    # What the replica says: see `replica.Listener`.

    def round_began(self, number: int) -> None:
        self._mind_budget()
        self._give_steps(number)
        if self.copies is not None:
            self.copies.begin(number)
        if number % CLOCK_EVERY_ROUNDS == 0:
            self._spawn(self._sample_clocks())

    def _mind_budget(self) -> None:
        """Over the budget of the day: train on, exchange nothing until there is room again."""
        counts = self.network.ledger.by_purpose().values()
        over = self.budget.over(time.monotonic(), sum(c.bytes_in + c.bytes_out for c in counts))
        replica, copies = self.replica, self.copies
        if replica is None or copies is None or replica.muted == over:
            return
        replica.muted = copies.muted = over
        self.say(
            "over the budget of the day: training on, exchanging nothing"
            if over
            else "within the budget again: exchanging"
        )
        self._write_node_event("over_budget" if over else "within_budget")

    def pause(self, paused: bool) -> None:
        """Stop training, or go on. The host stays a replica: it hears, votes and serves."""
        if self.trainer is None or paused == self.paused:
            return
        self.paused = paused
        self._spawn(self.trainer.pause(paused))
        self.say("training is paused" if paused else "training goes on")
        self._write_node_event("paused" if paused else "unpaused")

    def reported(self, report: act.Report, update_bytes: int) -> None:
        assert self.replica is not None
        ages = self.copies.ages(report.round) if self.copies else ()
        log = self.replica.state.log
        self.events.write(self.writer.round(self.now_s(), report, log, update_bytes, ages))
        if report.outcome != "decided":
            self.saver.due.set()

    def stepped(self, entry: Entry) -> None:
        self.saver.due.set()
        if entry.round % EVALUATE_EVERY == 0:
            self._spawn(self._evaluate())

    def moved(self, move: act.MoveTo, before: bytes) -> None:
        assert self.replica is not None
        number = self.replica.state.round
        self.events.write(self.writer.move(self.now_s(), number, move, before))
        self.saver.due.set()

    def excluded(self, peer: str, until_round: int) -> None:
        assert self.replica is not None
        number = self.replica.state.round
        self.events.write(self.writer.exclusion(self.now_s(), number, peer, until_round))

    def crowded(self) -> None:
        self._say_once(
            "crowded",
            f"block {self.block} has more than {MAX_GROUP} hosts; this one exchanges with "
            f"{MAX_GROUP - 1} of them",
        )

    async def _evaluate(self) -> None:
        """CE of the consensus and of the running weights; after a step, when there is time."""
        replica, trainer, measured = self.replica, self.trainer, self.writer.measured
        assert replica is not None and trainer is not None
        weights = to_float(replica.consensus.weights)
        measured.consensus_ce_nats = await trainer.evaluate(weights)
        measured.local_ce_nats = await trainer.evaluate(await trainer.snapshot())

    # What others say.

    def _on_record(self, event: act.PeerRecord) -> None:
        if self.replica is not None:
            self.replica.hear(event)

    async def _donors(self, block: int) -> Sequence[str]:
        found = await self.network.replicas(block, cap=8)
        newest = sorted(found, key=lambda s: -s.record.round)
        return [peer_text(s.peer_id) for s in newest if s.peer_id != self.network.peer_id]

    async def _discover(self) -> None:
        """Look the block's replicas up, now and in every round: newcomers show up here first."""
        period = self.run_file.rounds.period_s
        while True:
            with suppress(WireError):
                await self.board.look_up()
            await asyncio.sleep(min(period / 2, 15.0))

    async def _sample_clocks(self) -> None:
        """Ask some peers for their time; the median corrects ours."""

        async def ask(peer: bytes) -> None:
            sent = time.time()
            answer = await self.network.request(
                peer, messages.Hello(run=self.run_id), messages.HelloReply, deadline_s=5.0
            )
            sample = ClockSample(sent, answer.message.now_s, time.time())
            self.clock = self.clock.with_sample(peer_text(peer), sample)

        known = [peer for peer, _ in self.network.discovery.book.latest(8)]
        await asyncio.gather(*(ask(peer) for peer in known), return_exceptions=True)
        for peer in list(self.clock.samples)[:-CLOCKS_KEPT]:
            self.clock = self.clock.without(peer)

    # Words.

    def _write_node_event(self, what: str, detail: str = "") -> None:
        self.events.write(self.writer.node(self.now_s(), what, detail))

    def _say_once(self, about: str, text: str) -> None:
        if about not in self._trouble:
            self.say(text)
        self._trouble.add(about)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TrainerError):  # `_keep_trainer` is at it
            _log.error("a task of the host failed", exc_info=error)
