"""Streams that are kept between questions: reused, given up in time, and never missed when gone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from node.network.network import Network
from node.network.peers import NetworkPeers
from node.network.stream_pool import IDLE_PER_PEER, Kept, StreamPool
from protocol import messages
from protocol.frames import Refused
from protocol.identity import peer_text
from protocol.limits import EXCHANGES_PER_STREAM
from tests.support.loopback import RUN_ID, _no_daemon_left, node, run, until  # noqa: F401


class Quiet:
    """As much of a stream as the pool looks at."""

    def __init__(self) -> None:
        self.quiet, self.ended = True, False

    def abort(self) -> None:
        self.ended = True

    async def close(self) -> None:
        self.ended = True


def kept(exchanges: int = 1, age_s: float = 0.0) -> Any:
    stream: Any = Quiet()  # all of a stream that the pool touches
    return Kept(stream, exchanges, time.monotonic() - age_s)


def test_it_keeps_a_few_and_gives_the_latest_that_is_good() -> None:
    async def main() -> None:
        pool, peer = StreamPool(), b"peer"
        assert pool.take(peer) is None
        first, second = kept(), kept()
        assert pool.give(peer, first) and pool.give(peer, second)
        assert len(pool) == IDLE_PER_PEER and not pool.give(peer, kept())
        second.stream.quiet = False  # the peer let go of it
        assert pool.take(peer) is first and second.stream.ended and len(pool) == 0
        assert not pool.give(peer, kept(EXCHANGES_PER_STREAM))  # the other side ends it now
        assert pool.give(peer, kept(age_s=60.0))  # we were asleep: its timer has not run yet
        assert pool.take(peer) is None
        assert pool.give(peer, first)
        pool.clear()
        assert first.stream.ended and len(pool) == 0

    asyncio.run(main())


def test_what_nobody_asks_for_is_closed() -> None:
    async def main() -> None:
        pool, idle = StreamPool(idle_s=0.01), kept()
        assert pool.give(b"peer", idle)
        await until(lambda: idle.stream.ended)
        assert len(pool) == 0 and pool.take(b"peer") is None

    asyncio.run(main())


async def ask(network: Network, other: Network) -> None:
    hello = messages.Hello(run=RUN_ID)
    await NetworkPeers(network).ask(peer_text(other.peer_id), hello, messages.HelloReply, 10.0)


def test_questions_share_a_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a, node(tmp_path, "b", await a.invitations()) as b:
            for _ in range(EXCHANGES_PER_STREAM + 3):  # the other side ends it on the way
                await ask(b, a)
                assert a.transport.incoming_streams <= 2
            served = a.ledger.total().frames_in
            assert served >= EXCHANGES_PER_STREAM + 3
            await asyncio.gather(*(ask(b, a) for _ in range(3)))
            assert len(b._pool) == IDLE_PER_PEER

    run(main())


def test_a_refusal_ends_the_stream_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a, node(tmp_path, "b", await a.invitations()) as b:
            await ask(b, a)
            wrong = messages.Hello(run=bytes(32))
            try:
                await NetworkPeers(b).ask(peer_text(a.peer_id), wrong, messages.HelloReply, 10.0)
            except Refused:
                pass
            else:
                raise AssertionError("not refused")
            assert len(b._pool) == 0
            await ask(b, a)

    run(main())


def test_a_peer_that_came_back_is_asked_anew(tmp_path: Path) -> None:
    """The stream of before is gone, noticed or not: the question is asked on another."""

    async def main() -> None:
        async with node(tmp_path, "a") as a, node(tmp_path, "b", await a.invitations()) as b:
            await ask(b, a)
            for task in list(a.transport._tasks):  # the other side lets go of its streams
                task.cancel()
            await ask(b, a)
            await until(lambda: len(b._pool) == 1)

    run(main())
