"""A host in a run: network, trainer, one replica, and the copies of other blocks that it reads.

Decides the order in which they start and stop, when the trainer gets its next round, when copies
are renewed and when the state is written. What a round is stands in `swarm.round`; what is served
in `replica_service`; what a person sees of it is the caller's, through the event log.
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

from node.board import ReplicaBoard
from node.event_log import EventLog
from node.follow import Follower, FollowSettings
from node.host_state import HostState, StateFolder
from node.network import Network, NetworkSettings
from node.replica import Replica, ReplicaSettings
from node.replica_service import serve_replica
from node.service import Status
from node.trainer import Trainer, TrainerError
from node.trainer_process import TrainerSettings, followed_blocks
from protocol import messages
from protocol.errors import BlockswarmError, UsageError, WireError
from protocol.identity import peer_from_text, peer_text
from protocol.ledger import Count
from protocol.messages import Message, Purpose
from protocol.records import Role
from swarm import actions as act
from swarm.aggregate import to_float
from swarm.assignment import BlockView, HostLimits, first_choice
from swarm.clock import ClockSample, RunClock
from swarm.coupling import upstream_versions
from swarm.events import MoveEvent, NodeEvent, Refusal, RoundEvent, Traffic
from swarm.flat import flat_size, initial_flat
from swarm.log import Entry
from swarm.runfile import RunFile, parse, run_id, worker_memory_bytes
from swarm.updates import UpdateCodec
from swarm.worker import initial_block

M = TypeVar("M", bound=Message)
_log = logging.getLogger(__name__)

EVALUATE_EVERY = 4  # rounds; an evaluation costs as much as some steps
SAVE_EVERY_S = 30.0
CLOCK_EVERY_ROUNDS = 8


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


class NetworkPeers:
    """`fetch.Peers` over the live network: peers by their text."""

    def __init__(self, network: Network) -> None:
        self.network = network

    async def ask(
        self,
        peer: str,
        request: Message,
        wanted: type[M],
        deadline_s: float,
        max_payload_bytes: int | None = None,
    ) -> tuple[M, bytes]:
        answer = await self.network.request(
            peer_from_text(peer),
            request,
            wanted,
            deadline_s=max(deadline_s, 0.05),
            max_payload_bytes=max_payload_bytes,
        )
        return answer.message, bytes(answer.payload)


class Host:
    """One host. `run` takes part until it is cancelled."""

    def __init__(self, settings: HostSettings, say: Callable[[str], None]) -> None:
        self.settings, self.say = settings, say
        self.run_file: RunFile = parse(settings.network.run_file)
        self.run_id = run_id(settings.network.run_file)
        self.run_spec = self.run_file.run
        if not self.run_file.started:
            raise UsageError("this run has not started", "start it with: blockswarm seed run.toml")
        self.network = Network(settings.network, self._status, say)
        self.me = peer_text(self.network.peer_id)
        self.events = EventLog(settings.folder, say)
        self.clock = RunClock()
        self.block = -1
        self.replica: Replica | None = None
        self.trainer: Trainer | None = None
        self.followers: dict[int, Follower] = {}
        self.progress: dict[str, float | int | None] = {}
        self.consensus_ce: float | None = None
        self.local_ce: float | None = None
        self._booked: dict[Purpose, Count] = {}
        self._pending: set[asyncio.Task[None]] = set()
        self._dead_trainer = asyncio.Event()

    # Time.

    def now_s(self) -> float:
        return self.clock.run_time_s(time.time())

    def _status(self) -> Status:
        role = Role.REPLICA | (Role.SEED if self.settings.seed else 0)
        replica = self.replica
        if replica is None:
            return Status(int(role), 0, ())
        return Status(int(role), max(replica.state.round, 0), (self.block,))

    # Life.

    async def run(self) -> None:
        async with self.network:
            await self._begin()
            assert self.replica is not None
            loops = [
                asyncio.create_task(self.replica.run()),
                asyncio.create_task(self._discover()),
                asyncio.create_task(self._keep_state()),
                asyncio.create_task(self._keep_trainer()),
            ]
            try:
                done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
            finally:
                await self._leave(loops)

    async def _begin(self) -> None:
        folder = StateFolder(self.settings.folder)
        saved = folder.load(self.run_id)
        self.block = saved.block if saved else await self._choose_block()
        self.say(f"block {self.block} of {self.run_spec.model.blocks}")
        await self._sample_clocks()
        self.trainer = await self._start_trainer()
        codec = self._codec(self.block)
        settings = ReplicaSettings(
            self.run_id,
            self.block,
            self.run_file.rounds.rules(),
            codec,
            self.run_file.exchange.snapshot_every,
        )
        peers = NetworkPeers(self.network)
        self.board = ReplicaBoard(self.network, peers, self.block, self._role(), self._on_record)
        self.replica = Replica(
            settings,
            self.network.identity,
            initial_flat(self.run_spec, self.block),
            peers,
            self.board,
            self.trainer,
            self.now_s,
            self._on_report,
            self._on_move,
            self._on_step,
            self._on_round,
        )
        if saved is not None:
            await self._resume(folder, saved)
        serve_replica(
            self.network.service, self.replica, self.board.hear, self.board.known, time.time
        )
        self._follow_others(peers)
        self._on_round(self.replica.state.round)
        self.events.write(NodeEvent(time.time(), self.me, "resumed" if saved else "started"))

    async def _leave(self, loops: Sequence[asyncio.Task[None]]) -> None:
        for task in (*loops, *self._pending):
            task.cancel()
        await asyncio.gather(*loops, *self._pending, return_exceptions=True)
        with suppress(BlockswarmError):
            await self._save()
        if self.trainer is not None:
            await self.trainer.stop()
        self.events.write(NodeEvent(time.time(), self.me, "left"))

    def _role(self) -> int:
        return int(Role.REPLICA | (Role.SEED if self.settings.seed else 0))

    def _codec(self, block: int) -> UpdateCodec:
        size = flat_size(initial_block(self.run_spec, block))
        return UpdateCodec(self.run_file.exchange.codec, size)

    async def _choose_block(self) -> int:
        if self.settings.block is not None:
            if not 0 <= self.settings.block < self.run_spec.model.blocks:
                raise UsageError(
                    f"there is no block {self.settings.block}",
                    f"choose one of 0 to {self.run_spec.model.blocks - 1}, or leave --block away",
                )
            return self.settings.block
        views = []
        for block in range(self.run_spec.model.blocks):
            with suppress(WireError):
                found = await self.network.replicas(block)
                memory = worker_memory_bytes(self.run_file, block)
                views.append(BlockView(block, len(found), memory, 0, 1))
        limits = HostLimits(self.settings.memory_bytes, 1 << 60)
        chosen = first_choice(views, limits, random.Random(self.network.peer_id))
        if chosen is None:
            least = min((v.memory_bytes for v in views), default=0)
            raise UsageError(
                f"no block fits: the smallest worker needs {least / 1e9:.1f} GB of memory, "
                f"--max-memory allows {self.settings.memory_bytes / 1e9:.1f} GB",
                "raise --max-memory, or join a smaller run",
            )
        return chosen

    # The trainer.

    async def _start_trainer(self) -> Trainer:
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
        trainer = Trainer(settings, self.progress.update, self._dead_trainer.set)
        await trainer.start()
        return trainer

    async def _keep_trainer(self) -> None:
        """Start the training process again when it died: from the consensus, which we hold."""
        while True:
            await self._dead_trainer.wait()
            self._dead_trainer.clear()
            assert self.replica is not None and self.trainer is not None
            self.say("the training process died; starting it again")
            self.events.write(NodeEvent(time.time(), self.me, "trainer_restarted"))
            await self.trainer.stop()
            await self.trainer.start()
            await self.trainer.replace(to_float(self.replica.consensus.weights))
            await self.trainer.renew_copies({j: f.weights() for j, f in self.followers.items()})
            self._on_round(self.replica.state.round)

    def _on_round(self, number: int) -> None:
        """A new round began: the trainer may do its next steps, copies are renewed."""
        training, count = self.run_spec.training, self.run_file.rounds.count
        if 0 <= number < count:
            self._spawn(self._give_steps(number * training.steps_per_round))
        if self.followers:
            self._spawn(self._renew_copies(number))
        if number % CLOCK_EVERY_ROUNDS == 0:
            self._spawn(self._sample_clocks())

    async def _give_steps(self, step: int) -> None:
        assert self.trainer is not None
        with suppress(TrainerError):  # `_keep_trainer` is at it
            await self.trainer.begin_round(step, self.run_spec.training.steps_per_round)

    # Copies of other blocks.

    def _follow_others(self, peers: NetworkPeers) -> None:
        every = self.run_file.exchange.snapshot_every
        for block in followed_blocks(self.run_spec, self.block):
            settings = FollowSettings(self.run_id, block, self._codec(block), every, Purpose.RELAY)
            first = initial_flat(self.run_spec, block)
            self.followers[block] = Follower(settings, first, peers, self._donors)

    async def _donors(self, block: int) -> Sequence[str]:
        found = await self.network.replicas(block, cap=8)
        newest = sorted(found, key=lambda s: -s.record.round)
        return [peer_text(s.peer_id) for s in newest if s.peer_id != self.network.peer_id]

    async def _renew_copies(self, number: int) -> None:
        """Bring every copy to the version that this round's training reads.

        Round `number` has just opened its exchange; what it decides is there when the exchange is
        over, so we wait for that long and ask then. A block that nobody answers for stays as it
        is, and training goes on with it.
        """
        rules = self.run_file.rounds
        opened = rules.start_s + number * rules.period_s
        ready = opened + rules.deadline_floor_s + rules.vote_window_s + rules.repair_window_s
        await asyncio.sleep(max(0.0, ready - self.now_s()))
        wanted = dict(enumerate(upstream_versions(self.block, number, self._staggered)))
        wanted[self.block + 1] = number
        renewed = {}
        for block, follower in self.followers.items():
            try:
                if await follower.advance(wanted[block]):
                    renewed[block] = follower.weights()
            except (WireError, TimeoutError) as error:
                _log.info("block %d: its copy stays at round %d: %s", block, follower.round, error)
        assert self.trainer is not None
        with suppress(TrainerError):
            await self.trainer.renew_copies(renewed)

    @property
    def _staggered(self) -> bool:
        return self.run_spec.training.staggered

    # What others say.

    def _on_record(self, event: act.PeerRecord) -> None:
        if self.replica is not None:
            self.replica.hear(event)

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

    # What happened.

    def _on_report(self, report: act.Report) -> None:
        self._spawn(self._write_round(report))

    async def _write_round(self, report: act.Report) -> None:
        replica, trainer = self.replica, self.trainer
        assert replica is not None and trainer is not None
        if report.round % EVALUATE_EVERY == 0:
            with suppress(TrainerError):
                self.consensus_ce = await trainer.evaluate(to_float(replica.consensus.weights))
                self.local_ce = await trainer.evaluate(await trainer.snapshot())
        log = replica.state.log
        entry = next((e for e in reversed(log.entries) if e.round == report.round), None)
        left_out = [c.sender for c in entry.contributions if c.scale == 0] if entry else []
        steps = self.progress.get("steps")
        event = RoundEvent(
            time_s=time.time(),
            peer=self.me,
            block=self.block,
            round=report.round,
            outcome=report.outcome,
            in_time=report.in_time,
            late=report.late,
            missing=report.missing,
            refused=tuple(Refusal(peer, why) for peer, why in report.refused),
            agreed=report.agreed,
            left_out=tuple(left_out),
            included=report.included,
            voters=report.voters,
            first_deadline_s=report.first_deadline_s,
            consensus=log.head.digest.hex(),
            consensus_round=log.head.round,
            update_bytes=replica.state.own_size_bytes,
            traffic=self._traffic(),
            local_ce_nats=self.local_ce,
            consensus_ce_nats=self.consensus_ce,
            steps=int(steps) if steps else 0,
            copy_ages_rounds=tuple(report.round - f.round for f in self.followers.values()),
        )
        self.events.write(event)

    def _traffic(self) -> tuple[Traffic, ...]:
        """Bytes since the last round, by purpose."""
        now = self.network.ledger.by_purpose()
        before, self._booked = self._booked, now
        out = []
        for purpose, count in now.items():
            old = before.get(purpose, Count())
            name = purpose.name.lower().replace("_", "-")
            sent, received = count.bytes_out - old.bytes_out, count.bytes_in - old.bytes_in
            if sent or received:
                out.append(Traffic(name, sent, received))
        return tuple(out)

    def _on_move(self, move: act.MoveTo, before: bytes) -> None:
        assert self.replica is not None
        self.events.write(
            MoveEvent(
                time_s=time.time(),
                peer=self.me,
                block=self.block,
                round=self.replica.state.round,
                before=before.hex(),
                after=move.head.digest.hex(),
                rolled_back=len(move.plan.rollback),
                applied=len(move.plan.forward),
                from_snapshot=move.plan.snapshot is not None,
                mode=move.mode.value,
            )
        )

    def _on_step(self, entry: Entry) -> None:
        _log.debug("round %d decided: %s", entry.round, entry.digest.hex()[:12])

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._pending.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._pending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the host failed", exc_info=error)

    # State.

    async def _keep_state(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            try:
                await self._save()
            except BlockswarmError as error:
                self.say(f"{error.message}; training goes on")

    async def _save(self) -> None:
        replica, trainer = self.replica, self.trainer
        if replica is None or trainer is None:
            return
        folder = StateFolder(self.settings.folder)
        await folder.save(self.run_id, self.block, replica, trainer)

    async def _resume(self, folder: StateFolder, saved: HostState) -> None:
        replica, trainer = self.replica, self.trainer
        assert replica is not None and trainer is not None
        try:
            log = saved.restore(replica.consensus)
            await trainer.load(saved.trainer_path)
        except BlockswarmError as error:
            self.say(f"the saved state cannot be used ({error.message}); catching up instead")
            return
        replica.state = replace(replica.state, log=log)
