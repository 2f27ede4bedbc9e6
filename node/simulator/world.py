"""The hosts of a simulated swarm, the clock and the network between them.

Every host is a real one (`node.host.host`): it joins, trains a toy, exchanges, saves, restarts.
Chance comes from the seed alone, and each decision of the network from its own part of it, so that
two runs of one scenario with one seed are equal event by event.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
import shutil
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from node.host.block_work import HostParts
from node.host.event_log import EventLog
from node.host.host import Host
from node.host.saving import Saver
from node.host.settings import HostSettings
from node.machine.steady_time import SteadyTime
from node.network.addresses import with_peer
from node.network.daemon import DaemonSettings
from node.network.network import NetworkSettings
from node.network.service import Status
from node.replica.replica import Replica
from node.simulator.liar import liar
from node.simulator.network import SimNetwork
from node.simulator.scenario import AFTER, STEPS, Fault, Scenario
from node.simulator.story import Look, Story
from node.simulator.toy_trainer import ToyTrainer
from node.simulator.virtual_time import run_virtually
from node.trainer.process import TrainerSettings
from node.trainer.trainer import BlockTrainer, OnDeath, OnProgress
from protocol.admission import RecordTable
from protocol.errors import BlockswarmError
from protocol.identity import Identity
from swarm.events import LogEvent
from swarm.learning.flat import Floats, initial_flat
from swarm.run import Run
from swarm.runfile import parse, run_id

EPOCH_S = 1_700_000_000  # when simulated time begins, in unix time
LEAD_S = 5.0  # from the first hosts to the run's start
AGAIN_S = 10.0  # after a host could not join
LOOK_AT = 0.95  # of a round: by then its exchange is over
SEEDS = 3  # hosts through which others join
GOAL_SPREAD = 0.1  # how far the goals of two hosts of a block are apart
_NORMAL = NormalDist()

Looked = Callable[[Look], None]


class World:
    """One swarm. `run` is its whole life."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        folder: Path,
        looked: Looked | None = None,
        replica: type[Replica] = Replica,
    ) -> None:
        self.looked, self.replica = looked, replica
        self.scenario, self.seed, self.folder = scenario, seed, folder
        self.story = Story()
        loop = asyncio.get_running_loop()
        self._zero_s = loop.time()
        self.start_s = EPOCH_S + int(LEAD_S)
        self.run_text = scenario.run_text(self.start_s, seed)
        self.run_file = parse(self.run_text)
        self.run_id = run_id(self.run_text)
        self.table = RecordTable(frozenset({self.run_id}), blocks=scenario.blocks)
        self.hosts: dict[str, Host] = {}  # those that run
        self.trainers: dict[str, ToyTrainer] = {}
        self._identities = {name: self._identity(name) for name in scenario.names}
        self._names = {identity.peer_id: name for name, identity in self._identities.items()}
        self._sides: dict[str, int] = {}  # hosts on different sides cannot reach each other
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._over = False
        started = [name for fault in scenario.faults for name in fault.start]
        self._come_back = set(started)  # only what these save is ever read
        self._counts: dict[tuple[str, str], int] = defaultdict(int)
        self._busy_until_s: dict[str, float] = defaultdict(float)  # a host's line

    # Time and chance.

    def now_s(self) -> float:
        """True time, of which hosts see what their clocks show."""
        return EPOCH_S + asyncio.get_running_loop().time() - self._zero_s

    def round(self) -> float:
        return (self.now_s() - self.start_s) / self.scenario.period_s

    async def until_round(self, number: float) -> None:
        due_s = self.start_s + number * self.scenario.period_s
        await asyncio.sleep(max(due_s - self.now_s(), 0.0))

    def _chance(self, *about: object) -> float:
        """A number in (0, 1) that depends on the seed and on these, and on nothing else."""
        text = f"{self.seed}/" + "/".join(map(str, about))
        drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        return (drawn + 0.5) / 2**56

    def _identity(self, name: str) -> Identity:
        return Identity(hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=32).digest())

    # The network.

    def network_of(self, peer_id: bytes) -> SimNetwork | None:
        host = self.hosts.get(self._names.get(peer_id, ""))
        return host.network if host and isinstance(host.network, SimNetwork) else None

    def can_reach(self, source: bytes, target: bytes) -> bool:
        a, b = self._names[source], self._names.get(target, "")
        return b in self.hosts and self._sides.get(a, 0) == self._sides.get(b, 0)

    async def carry(self, source: bytes, target: bytes, size_bytes: int) -> bool:
        link = self.scenario.link
        a, b = self._names[source], self._names.get(target, "")
        self._counts[a, b] += 1
        count = self._counts[a, b]
        drawn = _NORMAL.inv_cdf(self._chance("latency", a, b, count))
        delay_s = link.latency_s * float(np.exp(link.jitter * drawn))
        loop = asyncio.get_running_loop()
        if size_bytes:
            sent_s = max(loop.time(), self._busy_until_s[a]) + size_bytes / link.bytes_per_s
            self._busy_until_s[a] = sent_s
            delay_s += sent_s - loop.time()
        await asyncio.sleep(delay_s)
        if a != b and link.loss and self._chance("loss", a, b, count) < link.loss:
            await asyncio.Event().wait()
        if self._sides.get(a, 0) != self._sides.get(b, 0):
            await asyncio.Event().wait()
        return b in self.hosts

    # Hosts.

    def start(self, name: str) -> None:
        """Let a host join, or come back with what it had saved."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        key = folder / "identity"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(self._identities[name].to_bytes())
        number = int(name[1:])
        network = NetworkSettings(
            DaemonSettings(key, port=4001),
            self.run_id,
            self.run_text,
            join=tuple(self._invitations(name)),
            state_folder=folder if name in self._come_back else None,
            blocks=self.scenario.blocks,
        )
        settings = HostSettings(
            network, folder, block=self.scenario.block_of(name), seed=number < SEEDS, serve=False
        )
        self._tasks[name] = asyncio.create_task(self._live(name, settings), name=name)

    def _invitations(self, name: str) -> list[str]:
        return [
            with_peer(_address(number), self._identities[seed].peer_id)
            for number, seed in enumerate(self.scenario.names[:SEEDS])
            if seed != name
        ]

    async def _live(self, name: str, settings: HostSettings) -> None:
        """Until it is ended. Who could not join tries again, as a person would."""
        say = partial(self._hear_said, name)
        while True:
            self.hosts[name] = host = Host(settings, say, self._parts(name))
            try:
                return await host.run()
            except BlockswarmError as error:
                say(error.message)
            except Exception as error:
                self.story.errors.append(f"{name} in round {self.round():.2f}: {error!r}")
                return
            finally:
                if self.hosts.get(name) is host and not self._over:
                    del self.hosts[name]
            await asyncio.sleep(AGAIN_S)

    async def kill(self, name: str) -> None:
        """As by kill -9: what it saves from now on is not kept."""
        host = self.hosts.pop(name, None)
        if name not in self._tasks:
            return
        if host is not None:
            self._count(name, host)
        folder, kept = self.folder / name, self.folder / f"{name}.kept"
        shutil.copytree(folder, kept)
        await self._end(name)
        shutil.rmtree(folder)
        kept.rename(folder)

    async def _end(self, name: str) -> None:
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _count(self, name: str, host: Host) -> None:
        self.story.moved[name] = host.network.ledger.total()  # kept over restarts, as live

    def _parts(self, name: str) -> HostParts:
        scenario, number = self.scenario, int(name[1:])
        rng = random.Random(f"{self.seed}/{name}")
        skew_s = scenario.skews_s.get(name, 0.0)
        clock = SteadyTime(lambda: self.now_s() + skew_s, asyncio.get_running_loop().time)

        def network(
            settings: NetworkSettings, status: Callable[[], Status], say: Callable[[str], None]
        ) -> SimNetwork:
            return SimNetwork(self, _address(number), clock, settings, status, say, rng)

        lie = scenario.lies.get(name)
        replica = self.replica if lie is None else liar(lie)
        events = partial(_Events, self, name)
        saver = Saver if name in self._come_back else _NothingSaved
        return HostParts(network, partial(self._trainer, name), replica, events, saver, rng)

    def _trainer(
        self, name: str, settings: TrainerSettings, on_progress: OnProgress, on_death: OnDeath
    ) -> ToyTrainer:
        scenario = self.scenario
        start = initial_flat(Run.from_dict(settings.run), settings.block)
        seed = int.from_bytes(self._identities[name].peer_id[-8:], "big")
        step_s = scenario.period_s / (STEPS + 1) / scenario.speeds.get(name, 1.0)
        self.trainers[name] = ToyTrainer(
            start,
            self.goal(name, len(start)),
            np.random.default_rng(seed),
            scenario.learning,
            scenario.noise,
            step_s,
            on_progress,
        )
        return self.trainers[name]

    def goal(self, name: str, size: int) -> Floats:
        """Where a host's training goes: near that of the others, for its text is like theirs."""
        block = self.scenario.block_of(name)
        common = np.random.default_rng([self.seed, block]).normal(size=size)
        own = np.random.default_rng([self.seed, block, 1 + int(name[1:])]).normal(size=size)
        return (common + GOAL_SPREAD * own).astype(np.float32)

    # Life.

    async def run(self) -> Story:
        scenario = self.scenario
        for name in scenario.names:
            if name not in scenario.later:
                self.start(name)
        loops = [asyncio.create_task(self._fate()), asyncio.create_task(self._watch())]
        try:
            await asyncio.gather(*loops)
        finally:
            self._over = True
            for task in loops:
                task.cancel()
            for name, host in list(self.hosts.items()):
                self._count(name, host)
            await asyncio.gather(*(self._end(name) for name in list(self._tasks)))
        return self.story

    async def _fate(self) -> None:
        joins = [Fault(number, start=(name,)) for name, number in self.scenario.later.items()]
        for fault in sorted([*self.scenario.faults, *joins], key=lambda f: f.round):
            await self.until_round(fault.round)
            for name in fault.kill:
                await self.kill(name)
            for name in fault.start:
                if name not in self._tasks:
                    self.start(name)
            if fault.cut:
                side = 1 + max(self._sides.values(), default=0)
                self._sides.update(dict.fromkeys(fault.cut, side))
            if fault.heal:
                self._sides.clear()

    async def _watch(self) -> None:
        for number in range(self.scenario.rounds + AFTER + 1):
            await self.until_round(number + LOOK_AT)
            look = Look(number, self.heads())
            self.story.looks.append(look)
            if self.looked is not None:
                self.looked(look)

    def heads(self) -> dict[int, dict[str, bytes]]:
        """Block -> host -> the head of its log, of the honest ones that work."""
        found: dict[int, dict[str, bytes]] = defaultdict(dict)
        for name, host in sorted(self.hosts.items()):
            if name not in self.scenario.lies and host.work is not None:
                found[host.block][name] = host.work.replica.state.log.head.digest
        return dict(found)

    def hear(self, name: str, event: LogEvent) -> None:
        self.story.events.append((self.now_s() - self.start_s, name, event))

    def _hear_said(self, name: str, line: str) -> None:
        self.story.said.append((self.now_s() - self.start_s, name, line))


class _NothingSaved(Saver):
    """Of a host that never comes back."""

    def load(self) -> None:
        return None

    async def run(self, replica: Replica, trainer: BlockTrainer, block: int) -> None:
        await asyncio.Event().wait()

    async def save(self, replica: Replica, trainer: BlockTrainer, block: int) -> None:
        pass


class _Events(EventLog):
    """A host's events, told to the world instead of a file."""

    def __init__(self, world: World, name: str, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(folder, say)
        self.world, self.name = world, name

    def write(self, event: LogEvent) -> None:
        self.world.hear(self.name, event)


def _address(number: int) -> str:
    """Each host in a network of its own: places in tables are shared out by networks."""
    return f"/ip4/{11 + number // 250}.{number % 250}.1.1/tcp/4001"


def run_scenario(
    scenario: Scenario, seed: int, folder: Path, looked: Looked | None = None
) -> Story:
    """The whole story of a scenario. `looked` hears of every round."""

    # The cyclic collector would look through all hosts again and again: a fifth of the time.
    gc.set_threshold(100_000, 50, 100)

    async def life() -> Story:
        return await World(scenario, seed, folder, looked).run()

    told: Any = run_virtually(life())
    assert isinstance(told, Story)
    return told
