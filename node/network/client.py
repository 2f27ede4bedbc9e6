"""A guest of a run: part of its network for a while, reachable by nobody, keeping nothing.

What `assemble` and `status` look through. Decides only what a guest asks of the DHT; imports no
torch of its own (hivemind does).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from node.network.daemon import DaemonSettings
from node.network.network import Network, NetworkSettings
from node.network.service import Status
from protocol import messages
from protocol.identity import peer_text
from protocol.messages import Message
from protocol.records import Role, SignedRecord
from swarm.rounds.clock import ClockSample, RunClock
from swarm.runfile import run_id

M = TypeVar("M", bound=Message)

REPLICAS_SEEN = 32  # of a block: their records are looked up, few of them are asked
CLOCKS_ASKED = 8
CLOCK_S = 5.0


@asynccontextmanager
async def client_network(
    text: bytes, addresses: Sequence[str], say: Callable[[str], None], role: Role
) -> AsyncIterator[Network]:
    """The network of the run whose file is `text`, with an identity that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="blockswarm-") as folder:
        daemon = DaemonSettings(Path(folder) / "identity", hosts=(), map_port=False)
        settings = NetworkSettings(daemon, run_id(text), text, join=tuple(addresses))
        async with Network(settings, lambda: Status(int(role), 0, ()), say) as network:
            yield network


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
