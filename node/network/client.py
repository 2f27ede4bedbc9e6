"""Guests of a run: part of its network for a while, reachable by nobody, keeping nothing.

`assemble`, `status`, `generate` and the gateway are guests.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from node.network.daemon import Daemon, DaemonSettings
from node.network.invitation import run_behind
from node.network.network import Network, NetworkSettings
from node.network.service import Status
from protocol import messages
from protocol.identity import load_or_create, peer_text
from protocol.ledger import Ledger
from protocol.records import Role, SignedRecord
from swarm.rounds.clock import ClockSample, RunClock
from swarm.runfile import run_id

REPLICAS_SEEN = 32  # of a block: their records are looked up, few of them are asked
CLOCKS_ASKED = 8
CLOCK_S = 5.0

NO_ROLE = Role(0)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Guest:
    """A p2pd with an identity that is thrown away. Made by `guest`."""

    daemon: Daemon
    ledger: Ledger

    async def fetch_run(self, addresses: Sequence[str], say: Say = lambda line: None) -> bytes:
        """The run file of the peers at these addresses, checked."""
        return await run_behind(self.daemon, self.ledger, addresses, say)

    @asynccontextmanager
    async def network(
        self, text: bytes, addresses: Sequence[str], say: Say, role: Role
    ) -> AsyncIterator[Network]:
        """The network of the run whose file is `text`. Ends this guest's p2pd with it."""
        settings = NetworkSettings(self.daemon.settings, run_id(text), text, join=tuple(addresses))
        status = Status(int(role), 0, ())
        network = Network(settings, lambda: status, say, daemon=self.daemon, ledger=self.ledger)
        async with network:
            yield network


@asynccontextmanager
async def guest() -> AsyncIterator[Guest]:
    with tempfile.TemporaryDirectory(prefix="blockswarm-") as folder:
        path = Path(folder) / "identity"
        load_or_create(path).close()
        daemon = await Daemon.start(DaemonSettings(path, hosts=(), map_port=False))
        try:
            yield Guest(daemon, Ledger())
        finally:
            await daemon.stop()


@asynccontextmanager
async def visit(
    addresses: Sequence[str], say: Say, role: Role = NO_ROLE, known: bytes | None = None
) -> AsyncIterator[tuple[bytes, Network]]:
    """The run file and the network of the run behind these addresses. `known`: its run file."""
    async with guest() as visitor:
        text = known or await visitor.fetch_run(addresses)
        async with visitor.network(text, addresses, say, role) as network:
            yield text, network


def replicas_of(network: Network) -> Callable[[int], Awaitable[list[SignedRecord]]]:
    """Looks up a block's replicas: their newest verified records."""

    async def look_up(block: int) -> list[SignedRecord]:
        found = await network.replicas(block, cap=REPLICAS_SEEN)
        return [s for s in found if s.record.role & Role.REPLICA and s.record.consensus]

    return look_up


async def run_clock(network: Network) -> RunClock:
    """The run's clock by the median of some peers'."""
    clock = RunClock()

    async def ask(peer: bytes) -> tuple[str, ClockSample]:
        sent_s = time.time()
        hello = messages.Hello(run=network.settings.run_id)
        answer = await network.request(peer, hello, messages.HelloReply, deadline_s=CLOCK_S)
        return peer_text(peer), ClockSample(sent_s, answer.message.now_s, time.time())

    known = network.discovery.book.trusted(CLOCKS_ASKED)
    answers = await asyncio.gather(*(ask(peer) for peer in known), return_exceptions=True)
    for answer in answers:
        if not isinstance(answer, BaseException):
            clock = clock.with_sample(*answer)
    return clock
