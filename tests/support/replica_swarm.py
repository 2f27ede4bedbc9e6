"""Replicas in one process, on a network of function calls: the real rounds, arithmetic and checks.

Trainers here are vectors that walk toward a goal, and time is virtual.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from node.network.service import Reply
from node.replica.canary import CanaryWatch
from node.replica.exchange import ReplicaSettings
from node.replica.replica import Replica
from node.replica.service import serve_replica
from node.simulator.virtual_time import run_virtually
from node.trainer.trainer import TrainerError
from protocol.frames import Oversize, Stalled, content_digest
from protocol.identity import Identity, load_or_create
from protocol.log import Entry
from protocol.messages import Message
from swarm.consensus.fixed_point import to_float
from swarm.consensus.updates import UpdateCodec
from swarm.learning.flat import Change, Floats
from swarm.rounds import actions as act
from swarm.rounds.deadline import DeadlineRules
from swarm.rounds.state import RoundRules
from tests.support.chains import no_records

SIZE = 512
PERIOD_S = 0.6
RUN = content_digest(b"test run")
QUANTUM = 2.0**-24


class Toy:
    """A trainer: in every round its weights go a part of the way to its goal."""

    def __init__(self, seed: int) -> None:
        common = np.random.default_rng(0).normal(size=SIZE)
        self.goal = (common + np.random.default_rng(seed).normal(size=SIZE) / 10).astype(np.float32)
        self.weights = np.zeros(SIZE, dtype=np.float32)
        self.alive, self.learns = True, True
        self.evaluations = 0
        self.before_snapshot: Callable[[], Awaitable[None]] | None = None

    def train(self) -> None:
        if self.learns:
            self.weights = (self.weights + 0.05 * (self.goal - self.weights)).astype(np.float32)

    def _check(self) -> None:
        if not self.alive:
            raise TrainerError("the training process died")

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
        """How far from the goal: what stands for the CE."""
        self._check()
        self.evaluations += 1
        return float(np.mean((flat - self.goal) ** 2))


class Swarm:
    """A network of function calls. A peer that is `down` does not answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.members: dict[str, Member] = {}
        self.down: set[str] = set()
        self.last: int | None = None  # the last exchange of the run
        # Not at the very start of a round: whoever is added now takes part from the next one on.
        self.start_s = asyncio.get_running_loop().time() - 0.3 * PERIOD_S

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.start_s

    async def ask(
        self,
        peer: str,
        request: Message,
        wanted: type[Any],
        deadline_s: float,
        max_payload_bytes: int | None = None,
    ) -> tuple[Any, bytes]:
        await asyncio.sleep(0)  # others have a turn, as on a network
        if peer in self.down or peer not in self.members:
            raise Stalled("nobody there")
        member = self.members[peer]
        reply: Reply = await member.handlers[type(request)](request, b"")
        payload = bytes(reply.payload) if not callable(reply.payload) else b""
        if max_payload_bytes is not None and len(payload) > max_payload_bytes:
            raise Oversize(f"{len(payload)} bytes")
        return reply.message, payload

    def add(self, name: str, kind: type[Replica] = Replica) -> Member:
        member = Member(self, name, kind)
        self.members[member.replica.me] = member
        return member

    async def until(self, condition: Callable[[], Any], limit_s: float = 30.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # of virtual time


class Member:
    """A replica with its toy trainer, its board and its ear."""

    def __init__(self, swarm: Swarm, name: str, kind: type[Replica]) -> None:
        self.swarm, self.name = swarm, name
        self.identity: Identity = load_or_create(swarm.folder / f"{name}.key")
        self.toy = Toy(sum(name.encode()))
        self.reports: list[act.RoundReport] = []
        self.entries: list[Entry] = []
        self.moves: list[act.MoveTo] = []
        self.exclusions: list[str] = []
        self.reasons: list[str] = []
        self.losses_nats: list[float] = []
        self.canary: CanaryWatch | None = None
        self.losses: list[str] = []
        self.told_crowded = 0
        self.handlers: dict[type, Any] = {}
        rules = RoundRules(0.0, PERIOD_S, DeadlineRules(0.15, 0.2), 0.08, 0.07, swarm.last)
        settings = ReplicaSettings(RUN, 0, rules, UpdateCodec("topk:0.1:8", SIZE), 4)
        zero = np.zeros(SIZE, dtype=np.float32)
        self.replica = kind(settings, self.identity, zero, swarm, self, self.toy, swarm.now_s, self)
        service: Any = self  # all of a service that it uses is `serve`
        serve_replica(service, self.replica, no_records, lambda: 0.0)
        self.tasks: list[asyncio.Task[None]] = []

    def start(self) -> Member:
        self.tasks = [
            asyncio.create_task(self.replica.running.queue.run()),
            asyncio.create_task(self.replica.run()),
        ]
        return self

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.identity.close()

    def serve(self, kind: type, handler: Any, bulk: bool = False) -> None:
        self.handlers[kind] = handler

    # Board

    async def publish(
        self, announcement: act.PublishRecord, quiet: Callable[[], Awaitable[None]]
    ) -> None:
        a, me = announcement, self.replica.me
        record = act.PeerRecord(
            me, a.round, a.head, a.head_round, a.update, a.size_bytes, a.proposal_s
        )
        for peer, member in self.swarm.members.items():
            if peer != me and peer not in self.swarm.down and me not in self.swarm.down:
                member.replica.hear(record)

    # Listener

    def round_began(self, number: int) -> None:
        self.toy.train()

    def reported(self, report: act.RoundReport, update_bytes: int) -> None:
        self.reports.append(report)

    def stepped(self, entry: Entry) -> None:
        self.entries.append(entry)
        if self.canary is not None:
            self.tasks.append(asyncio.create_task(self._look(self.canary)))

    async def _look(self, canary: CanaryWatch) -> None:
        loss = await canary.look()
        if loss is not None:
            self.losses_nats.append(loss)

    def moved(self, move: act.MoveTo, before: bytes) -> None:
        self.moves.append(move)

    def excluded(self, peer: str, until_round: int, reason: str) -> None:
        self.exclusions.append(peer)
        self.reasons.append(reason)

    def weights_lost(self, why: str) -> None:
        self.losses.append(why)

    def crowded(self) -> None:
        self.told_crowded += 1

    # What tests ask

    @property
    def head(self) -> Entry:
        return self.replica.state.log.head

    def unsent(self) -> Floats:
        aside = self.replica.running.aside
        learned = self.toy.weights if aside is None else self.toy.weights + aside
        return learned - to_float(self.replica.consensus.weights)


def run(work: Callable[[Swarm], Awaitable[None]], folder: Path) -> None:
    async def main() -> None:
        swarm = Swarm(folder)
        try:
            async with asyncio.timeout(60.0):
                await work(swarm)
        finally:
            for member in swarm.members.values():
                await member.stop()

    run_virtually(main())


def same_head(members: list[Member]) -> bool:
    return len({m.head.digest for m in members}) == 1
