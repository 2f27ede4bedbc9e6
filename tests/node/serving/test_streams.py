"""Streams that many outputs share: what one of them does is no harm to the others."""

from __future__ import annotations

import asyncio

import pytest

from node.network.service import Reply, Service
from node.serving.streams import PeerStream
from protocol.frames import BytesLike, Truncated
from protocol.ledger import Ledger
from protocol.messages import Ping, Pong
from tests.support.loopback import run
from tests.support.memory_stream import MemoryStream, stream_pair

SECONDS = 10.0


class Held(MemoryStream):
    """Writes wait until it is opened, as with a peer that does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.open = asyncio.Event(), asyncio.Event()

    async def write(self, data: BytesLike, timeout_s: float) -> None:
        self.writing.set()
        await self.open.wait()
        await super().write(data, timeout_s)


def served() -> tuple[Held, asyncio.Task[None]]:
    """A stream to somebody who answers pings."""

    async def pong(request: Ping, _: bytes) -> Reply:
        return Reply(Pong(nonce=request.nonce, now_s=0.0, transfers=0))

    service, ours = Service(Ledger()), Held()
    theirs, _ = stream_pair()
    ours.other, theirs.other = theirs, ours
    service.serve(Ping, pong)
    return ours, asyncio.create_task(service.on_stream(theirs, b"peer"))


async def asked(stream: PeerStream, nonce: int) -> int:
    stream.assign()
    return (await stream.ask(Ping(nonce=bytes([nonce])), Pong, SECONDS)).nonce[0]


def test_answers_come_to_those_who_asked() -> None:
    async def main() -> None:
        ours, serving = served()
        ours.open.set()
        stream = PeerStream(ours, SECONDS)
        nonces = await asyncio.gather(*(asked(stream, n) for n in range(9)))
        assert nonces == list(range(9)) and not stream.lost.done()
        await stream.close()
        await serving

    run(main())


def test_who_goes_away_in_the_middle_of_a_frame_does_not_end_the_stream_of_others() -> None:
    """A client that has its result lets go of its questions, whatever they are just doing."""

    async def main() -> None:
        ours, serving = served()
        stream = PeerStream(ours, SECONDS)
        leaves = asyncio.create_task(asked(stream, 1))
        await ours.writing.wait()
        waits = asyncio.create_task(asked(stream, 2))  # for its turn, and goes away, too
        stays = asyncio.create_task(asked(stream, 3))
        await asyncio.sleep(0)  # one turn: both wait behind the frame that is being sent
        leaves.cancel()
        waits.cancel()
        for gone in (leaves, waits):
            with pytest.raises(asyncio.CancelledError):
                await gone
        ours.open.set()
        assert await stays == 3
        assert await asked(stream, 4) == 4 and not stream.lost.done()
        await stream.close()
        await serving

    run(main())


def test_a_stream_that_breaks_while_nobody_waits_says_so_to_the_next() -> None:
    async def main() -> None:
        ours, serving = served()
        stream = PeerStream(ours, SECONDS)
        leaves = asyncio.create_task(asked(stream, 1))
        await ours.writing.wait()
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        ours.other.abort()
        ours.open.set()
        with pytest.raises(Truncated):
            await asked(stream, 2)
        assert stream.lost.done()
        await stream.close()
        await serving

    run(main())
