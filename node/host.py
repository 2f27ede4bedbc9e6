"""A host in a run: network, training, one replica, and the copies of other blocks that it reads.

Decides the order in which they start and stop, and that a host leaves its block for one that is in
need. What a round is stands in `swarm.round`; how the training process is kept in `training`; when
the state is written in `saving`; which block, in `block_choice`; what is served in
`replica_service`; what a person sees, through the events, is the caller's.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from node.atomic import StorageError
from node.block_choice import UNLIMITED, BlockWatch, choose_block
from node.board import ReplicaBoard
from node.budget import DailyBudget
from node.canary import CanaryWatch
from node.copies import Copies
from node.event_log import EventLog
from node.exchange import ReplicaSettings
from node.follow import Follower
from node.host_events import EventWriter
from node.host_state import HostState
from node.network import Network, NetworkPeers, NetworkSettings
from node.peer_clock import PeerClock
from node.phases import mark
from node.replica import Replica
from node.replica_service import serve_replica
from node.running_weights import Moment
from node.saving import Saver
from node.serve_trained import trained_server
from node.service import Status
from node.take_over import copy_of_lost_block
from node.trainer import TrainerError
from node.trainer_process import TrainerSettings
from node.training import Training
from protocol.errors import BlockswarmError, UsageError, WireError
from protocol.identity import peer_text
from protocol.records import Role
from swarm import actions as act
from swarm.flat import flat_size, initial_flat
from swarm.groups import MAX_GROUP
from swarm.log import Entry
from swarm.runfile import RunFile, parse, run_id
from swarm.updates import UpdateCodec
from swarm.worker import initial_block

_log = logging.getLogger(__name__)

LOCAL_CE_EVERY = 4  # rounds; the CE of the consensus is measured whenever the canary has time
CLOCK_EVERY_ROUNDS = 8
LOOK_AT_BLOCKS_S = 5.0  # at most so often, and once a round
LEAVE_SAVE_S = 2.0  # leaving takes 5 s at most; what was saved before is whole


@dataclass(frozen=True)
class HostSettings:
    """What a person decides about a host."""

    network: NetworkSettings
    folder: Path
    data_spec: str | None = None  # None: what the run says
    block: int | None = None  # None: the neediest one, and another if that falls in need
    device: str = "auto"
    threads: int | None = None
    memory_bytes: int = UNLIMITED
    seed: bool = False  # announce ourselves as a peer to join through
    bytes_per_day: int | None = None  # both ways; beyond it the host trains on and moves no bulk
    up_bytes_per_s: float | None = None  # None: no limit
    down_bytes_per_s: float | None = None
    serve: bool = True  # answer sweeps with the block that is trained


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
        # After the last round of training there is one more exchange, of what was learned in it.
        self.rules = replace(self.run_file.rounds.rules(), last=self.run_file.rounds.count)
        self.saver = Saver(settings.folder, self.run_id, self._write_node_event, say)
        network = replace(
            settings.network,
            up_bytes_per_s=settings.up_bytes_per_s,
            down_bytes_per_s=settings.down_bytes_per_s,
        )
        self.network = Network(network, self._status, say)
        self.me = peer_text(self.network.peer_id)
        self.events = EventLog(settings.folder, say)
        self.writer = EventWriter(self.me, self.network.ledger)
        self.served = (
            trained_server(self.network, self.run_id, self.run_spec, settings.threads, say)
            if settings.serve
            else None
        )
        self.clock = PeerClock(self.network, self.run_id)
        self.budget = DailyBudget(settings.bytes_per_day)
        self.budget.load(settings.folder)
        self.network.on_save.append(lambda: self.budget.save(settings.folder))
        self.block = -1
        self.replica: Replica | None = None
        self.training: Training | None = None
        self.copies: Copies | None = None
        self.canary: CanaryWatch | None = None
        self.paused = False
        self.ended = False
        self._local_ce_due = 0  # the round from which on it is measured again
        self._here_since = 0  # the round in which the work on this block began
        self._trouble: set[str] = set()  # what was said already
        self._tasks: set[asyncio.Task[None]] = set()

    # Time.

    def now_s(self) -> float:
        return self.clock.now_s()

    def _round_now(self) -> int:
        return int((self.now_s() - self.rules.start_s) // self.rules.period_s)

    def _status(self) -> Status:
        replica = self.replica
        if replica is None:
            return Status(self._role(), 0, ())
        ce_nats = self.writer.measured.newest_ce_nats
        return Status(self._role(), max(replica.state.round, 0), (self.block,), ce_nats)

    def _role(self) -> int:
        role = Role.REPLICA
        if self.settings.seed:
            role |= Role.SEED
        if self.served is not None:
            role |= Role.SERVER
        return int(role)

    # Life.

    async def run(self) -> None:
        saved = self.saver.load()
        # Whoever has been here before goes on alone if nobody answers.
        await self.network.start(alone_ok=saved is not None or self.settings.seed)
        try:
            if self.served is not None:
                self.served.start()
            await self.clock.sample()
            # What is imported by now (torch, hivemind) stays: a full collection that looks through
            # it all holds the event loop for 115 ms, in the middle of somebody's round.
            gc.freeze()
            self.block = saved.block if saved else await self._choose_block()
            followers: Mapping[int, Follower] = {}
            while True:
                target = await self._work(saved, followers)
                followers = self.copies.followers if self.copies else {}
                saved = None
                self._move(target)
        finally:
            if self.served is not None:
                await self.served.stop()
            self._write_node_event("left")
            try:
                await self.network.stop()
            except StorageError as error:
                self._say_once("storage", error.message)

    async def _choose_block(self) -> int:
        return await choose_block(
            self.network,
            self.run_file,
            self.settings.block,
            self.settings.memory_bytes,
            self._round_now(),
        )

    async def _work(self, saved: HostState | None, followers: Mapping[int, Follower]) -> int:
        """Work on a block until cancelled, or until another one is in need: which one."""
        loops: list[asyncio.Task[None]] = []
        watch = asyncio.create_task(self._watch_blocks())
        try:
            replica = await self._begin(saved, followers)
            assert self.copies is not None and self.training is not None
            loops = [
                asyncio.create_task(replica.running.queue.run()),
                asyncio.create_task(replica.run()),
                asyncio.create_task(self.copies.run()),
                asyncio.create_task(self._discover()),
                asyncio.create_task(self.saver.run(replica, self.training.trainer, self.block)),
                asyncio.create_task(self.training.keep(replica, self.copies)),
            ]
            done, _ = await asyncio.wait({*loops, watch}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return watch.result()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await self._end_work(loops)

    async def _begin(self, saved: HostState | None, followers: Mapping[int, Follower]) -> Replica:
        self.writer.block = self.block
        self.say(f"block {self.block} of {self.run_spec.model.blocks}")
        mark("block")
        self.training = training = self._new_training()
        await training.start(self.paused)
        mark("trainer")
        peers = NetworkPeers(self.network)
        exchange = self.run_file.exchange
        self.board = ReplicaBoard(
            self.network,
            peers,
            self.block,
            self._role(),
            self._on_record,
            self.rules.period_s / 2,
        )
        codec = UpdateCodec(exchange.codec, flat_size(initial_block(self.run_spec, self.block)))
        self.replica = self.replica_type(
            ReplicaSettings(self.run_id, self.block, self.rules, codec, exchange.snapshot_every),
            self.network.identity,
            initial_flat(self.run_spec, self.block),
            peers,
            self.board,
            training.trainer,
            self.now_s,
            self,
        )
        self.canary = CanaryWatch(self.replica, training.trainer.evaluate)
        if saved is not None:
            await self.saver.resume(
                saved, self.replica, training.trainer, codec, exchange.snapshot_every
            )
        copies = await self._begin_copies(peers, followers)
        if saved is None:
            await self._go_on_from_a_copy(peers, followers)
        serve_replica(
            self.network.service,
            self.replica,
            self.board.hear,
            self.board.known,
            time.time,
            copies.held,
        )
        self._offer(self.replica.state.log.head.round)
        self._here_since = self.replica.state.round
        self.round_began(self.replica.state.round)
        self._write_node_event("resumed" if saved else "started")
        return self.replica

    async def _begin_copies(self, peers: NetworkPeers, followers: Mapping[int, Follower]) -> Copies:
        """Follow the blocks that we read."""
        assert self.training is not None
        trainer = self.training.trainer
        self.copies = copies = Copies(
            self.run_file,
            self.run_id,
            self.block,
            peers,
            self._donors,
            self.now_s,
            trainer.renew_copies,
        )
        if followers:
            copies.adopt(followers)
            await trainer.renew_copies(copies.weights())
        return copies

    async def _go_on_from_a_copy(
        self, peers: NetworkPeers, followers: Mapping[int, Follower]
    ) -> None:
        """Of a block that lost all its hosts, go on from the newest copy that others follow."""
        assert self.replica is not None
        if self._round_now() < 1:
            return
        copy = await copy_of_lost_block(
            self.network, peers, self.run_file, self.block, self._round_now(), followers
        )
        if copy is not None and copy.round >= 0:
            self.say(f"block {self.block} has no host: going on from a copy of round {copy.round}")
            self.replica.restore(Moment(copy.log, copy.consensus, {}))
            self.replica.reset_weights()

    async def _end_work(self, loops: Sequence[asyncio.Task[None]]) -> None:
        """Stop hearing, save, stop the training."""
        others = [*loops[1:], *self._tasks]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if loops and self.replica and self.training:
            # The queue of the weights is still at work: save through it.
            with suppress(BlockswarmError, TimeoutError):
                async with asyncio.timeout(LEAVE_SAVE_S):
                    await self.saver.save(self.replica, self.training.trainer, self.block)
            loops[0].cancel()
            await asyncio.gather(loops[0], return_exceptions=True)
        if self.training is not None:
            await self.training.trainer.stop()

    # Another block.

    async def _watch_blocks(self) -> int:
        """The block that needs us more than ours does, once there is one."""
        settings = self.settings
        watch = BlockWatch(self.network, self.run_file, settings.memory_bytes)
        while True:
            await asyncio.sleep(max(self.rules.period_s, LOOK_AT_BLOCKS_S))
            replica = self.replica
            if settings.block is not None or self.ended or replica is None or replica.muted:
                continue
            rounds_here = replica.state.round - self._here_since
            if watch.resting(rounds_here):
                continue
            left = self.budget.left_bytes(time.time(), self._moved_bytes())
            with suppress(WireError):
                target = await watch.look(
                    self.block,
                    replica.state.round,
                    rounds_here,
                    UNLIMITED if left is None else left,
                )
                if target is not None:
                    return target

    def _move(self, target: int) -> None:
        self.say(f"block {target} has too few hosts: moving there from block {self.block}")
        facts = {"from": str(self.block), "to": str(target)}
        detail = f"from block {self.block} to block {target}, which has too few hosts"
        self._write_node_event("moved_block", detail, facts)
        self.block, self.replica, self.training, self.canary = target, None, None, None
        self.writer.measured.newest_ce_nats = None

    # The training.

    def _new_training(self) -> Training:
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
            self.run_file.data.sha256,
        )
        measured = self.writer.measured
        return Training(
            settings, self.run_file, measured, self._write_node_event, self.say, self._spawn
        )

    def weights_lost(self, why: str) -> None:
        if self.training is not None:
            self.training.lost(why)

    def pause(self, paused: bool) -> None:
        """Stop training, or go on. The host stays a replica: it hears, votes and serves."""
        if self.training is None or paused == self.paused:
            return
        self.paused = paused
        self.training.pause(paused)
        self.say("training is paused" if paused else "training goes on")
        self._write_node_event("paused" if paused else "unpaused")

    # What the replica says: see `replica.Listener`.

    def round_began(self, number: int) -> None:
        self._mind_budget()
        if self.rules.ended(number):
            self._end_run()
            return
        if self.training is not None:
            self.training.give_steps(number)
        if self.copies is not None:
            self.copies.begin(number)
        if number % CLOCK_EVERY_ROUNDS == 0:
            self._spawn(self.clock.sample())

    def _end_run(self) -> None:
        """The last exchange is over: no more training, and the consensus stays here to be had."""
        if not self.ended:
            self.ended = True
            if self.copies is not None:
                self.copies.muted = True  # nothing reads them any more
            self.say("the run has ended; its consensus is served as long as this host runs")
            detail = f"after {self.run_file.rounds.count} rounds"
            self._write_node_event("run_ended", detail)

    def _moved_bytes(self) -> int:
        return self.network.ledger.total().bytes_total

    def _mind_budget(self) -> None:
        """Over the budget of the day: train on, exchange nothing until there is room again."""
        over = self.budget.over(time.time(), self._moved_bytes())
        replica, copies = self.replica, self.copies
        if replica is None or copies is None or replica.muted == over:
            return
        replica.muted = copies.muted = over
        if self.served is not None:
            self.served.mute(over)
        self.say(
            "over the budget of the day: training on, exchanging and serving nothing"
            if over
            else "within the budget again: exchanging"
        )
        self._write_node_event("over_budget" if over else "within_budget")

    def reported(self, report: act.Report, update_bytes: int) -> None:
        assert self.replica is not None
        ages = self.copies.ages(report.round) if self.copies else ()
        log = self.replica.state.log
        self.events.write(self.writer.round(self.now_s(), report, log, update_bytes, ages))
        if report.outcome != "decided":
            self.saver.due.set()

    def _offer(self, round_: int) -> None:
        """Serve the consensus as it is now, that of a round."""
        if self.served is not None and self.replica is not None:
            self.served.offer(self.block, round_, self.replica.consensus.weights)

    def stepped(self, entry: Entry) -> None:
        self._offer(entry.round)
        self.saver.due.set()
        self._spawn(self._evaluate(entry.round))

    def moved(self, move: act.MoveTo, before: bytes) -> None:
        assert self.replica is not None
        number = self.replica.state.round
        self.events.write(self.writer.move(self.now_s(), number, move, before))
        self._offer(move.head.round)
        self.saver.due.set()

    def excluded(self, peer: str, until_round: int, reason: str) -> None:
        assert self.replica is not None
        number = self.replica.state.round
        self.events.write(self.writer.exclusion(self.now_s(), number, peer, until_round, reason))

    def crowded(self) -> None:
        self._say_once(
            "crowded",
            f"block {self.block} has more than {MAX_GROUP} hosts; this one exchanges with "
            f"{MAX_GROUP - 1} of them",
        )

    async def _evaluate(self, number: int) -> None:
        """CE of the consensus, now and then of the running weights; after a step, if it is time."""
        canary, training, measured = self.canary, self.training, self.writer.measured
        assert canary is not None and training is not None
        found = await canary.look()
        if found is None:
            return
        measured.consensus_ce_nats = measured.newest_ce_nats = found
        if number >= self._local_ce_due:
            self._local_ce_due = number + LOCAL_CE_EVERY
            running = await training.trainer.snapshot()
            measured.local_ce_nats = await training.trainer.evaluate(running)

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
        while True:
            with suppress(WireError):
                await self.board.look_up()
            await asyncio.sleep(min(self.rules.period_s / 2, 15.0))

    # Words.

    def _write_node_event(
        self, what: str, detail: str = "", facts: Mapping[str, str] | None = None
    ) -> None:
        self.events.write(self.writer.node(self.now_s(), what, detail, facts))

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
        if error is not None and not isinstance(error, TrainerError):  # `training` is at it
            _log.error("a task of the host failed", exc_info=error)
