"""A seed that does not train: newcomers find the run through it, and it helps them to be reached.

Answers hello, run and peers, keeps a share of the DHT, forwards for hosts behind NAT (p2pd does
that), and looks every block up now and then, so that it can tell strangers who is there. Holds no
weights and needs no torch of its own. Knows nothing of rounds but what time it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from node.host.event_log import EventLog
from node.host.live_line import HostView, LinePart, RunTimes
from node.machine.atomic import StorageError
from node.network.network import Network, NetworkSettings
from node.network.service import Status
from protocol.errors import UsageError, WireError
from protocol.identity import peer_text
from protocol.limits import BLOCK_NONE
from protocol.records import Record, Role
from swarm.events import NodeEvent
from swarm.rounds.clock import round_at
from swarm.runfile import RunFile, parse

LOOK_EVERY_S = 15.0


class SeedPeer:
    """`run` answers until it is cancelled."""

    def __init__(
        self,
        settings: NetworkSettings,
        folder: Path,
        say: Callable[[str], None],
        network: Callable[..., Network] = Network,
    ) -> None:
        self.folder, self.say = folder, say
        self.run_file: RunFile = parse(settings.run_file)
        if not self.run_file.started:
            raise UsageError("this run has not started", "start it with: blockswarm seed run.toml")
        self.network = network(settings, self._status, say)
        self.events = EventLog(folder, say)
        self.replicas: dict[int, int] = {}  # of every block, as seen last

    @property
    def round(self) -> int:
        rounds = self.run_file.rounds
        return max(0, round_at(time.time(), rounds.start_s, rounds.period_s))

    def _status(self) -> Status:
        return Status(int(Role.SEED), self.round)

    async def run(self) -> None:
        # The first of its run, or started again: alone is no reason to stop.
        await self.network.start(alone_ok=True)
        try:
            self._tell("started")
            while True:
                await self._announce()
                await self._look()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._tell("left")
            with suppress(StorageError):
                await self.network.stop()

    async def _announce(self) -> None:
        record = Record(
            run=self.network.settings.run_id,
            role=int(Role.SEED),
            block=BLOCK_NONE,
            round=self.round,
            sequence=0,  # the network numbers and signs it
        )
        with suppress(WireError):  # nobody there to keep it
            await self.network.announce(record)

    async def _look(self) -> None:
        """Who is there: to tell strangers, and to know whom to join again through."""
        seen = dict(self.replicas)
        for block in range(self.run_file.run.model.blocks):
            with suppress(WireError):
                found = await self.network.replicas(block)
                seen[block] = sum(bool(s.record.role & Role.REPLICA) for s in found)
        if seen != self.replicas:
            self.replicas = seen
            self.say(f"hosts on the blocks: {self._counts()}")

    def _counts(self) -> str:
        blocks = range(self.run_file.run.model.blocks)
        return " ".join(str(self.replicas.get(block, 0)) for block in blocks)

    def pause(self, paused: bool) -> None:
        """There is no training to pause."""

    def line(self, view: HostView, times: RunTimes, now_s: float) -> list[LinePart]:
        """What the live line says."""
        return [
            (9, "seed, not training"),
            (8, f"round {self.round}/{times.count}"),
            (7, f"hosts on the blocks: {self._counts()}"),
            (5, times.words(now_s)),
        ]

    def _tell(self, what: str) -> None:
        me = peer_text(self.network.peer_id)
        self.events.write(NodeEvent(time.time(), me, what, facts={"role": "seed"}))
