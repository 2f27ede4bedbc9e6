"""Streams that serving keeps open between hosts, and one exchange on them.

Decides how many streams to a peer there are and how long an idle one is worth keeping: opening one
costs a round trip, which a byte at a time would pay for every byte. Knows messages, not sweeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

from node.network import Network
from protocol import messages
from protocol.errors import WireError
from protocol.frames import Channel, Deadline, Tally
from protocol.identity import peer_text
from protocol.limits import BLOCK_NONE, EXCHANGES_PER_STREAM, STREAMS_PER_PEER
from protocol.messages import Message, Purpose

R = TypeVar("R", bound=Message)

IDLE_S = 5.0  # a responder gives up on a silent stream after STALL_S
STREAMS_KEPT = STREAMS_PER_PEER - 1  # one is left for everything else
EXCHANGES_PER_USE = 2  # a sweep, and the wait for it


@dataclass
class _Kept:
    channel: Channel
    uses: int = 0
    since_s: float = 0.0


class StreamPool:
    """Leases streams to peers. One sweep has one stream to itself until it is handed over."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._idle: dict[bytes, list[_Kept]] = defaultdict(list)
        self._places: dict[bytes, asyncio.Semaphore] = {}  # while somebody is or waits inside
        self._users: Counter[bytes] = Counter()

    @contextlib.asynccontextmanager
    async def lease(
        self, peer_id: bytes, seconds: float, block: int = BLOCK_NONE, keep: bool = True
    ) -> AsyncIterator[Channel]:
        """A stream to the peer, for so long. After an error, or worn out, it is dropped.

        An open stream takes one of the peer's places: `keep` it only if it will soon be used.

        The time begins when there is a place: waiting for one is our queue, not the peer's fault.
        """
        async with self._place(peer_id):
            kept = await self._open(peer_id, Deadline.after(seconds, seconds))
            try:
                yield kept.channel
            except BaseException:
                kept.channel.stream.abort()
                raise
            else:
                await self._give_back(peer_id, kept, keep)
            finally:
                tally, kept.channel.tally = kept.channel.tally, Tally()
                self.network.ledger.book(tally, peer_text(peer_id), Purpose.SERVING, block)

    @contextlib.asynccontextmanager
    async def _place(self, peer_id: bytes) -> AsyncIterator[None]:
        place = self._places.setdefault(peer_id, asyncio.Semaphore(STREAMS_KEPT))
        self._users[peer_id] += 1
        try:
            async with place:
                yield
        finally:
            self._users[peer_id] -= 1
            if not self._users[peer_id]:
                del self._users[peer_id], self._places[peer_id]

    async def _open(self, peer_id: bytes, deadline: Deadline) -> _Kept:
        idle = self._idle[peer_id]
        while idle:
            kept = idle.pop()
            if time.monotonic() - kept.since_s < IDLE_S:
                kept.channel.deadline = deadline
                return kept
            kept.channel.stream.abort()
        known = self.network.discovery.book.addresses(peer_id)
        stream = await self.network.transport.dial(peer_id, known, deadline)
        return _Kept(Channel(stream, deadline))

    async def _give_back(self, peer_id: bytes, kept: _Kept, keep: bool) -> None:
        kept.uses += 1
        worn = kept.uses * EXCHANGES_PER_USE > EXCHANGES_PER_STREAM - EXCHANGES_PER_USE
        if worn or not keep:
            with contextlib.suppress(WireError):
                await kept.channel.stream.close()
            return
        kept.since_s = time.monotonic()
        self._idle[peer_id].append(kept)
        self._drop_old()

    def _drop_old(self) -> None:
        now_s = time.monotonic()
        for peer_id in list(self._idle):
            fresh = []
            for kept in self._idle[peer_id]:
                if now_s - kept.since_s < IDLE_S:
                    fresh.append(kept)
                else:
                    kept.channel.stream.abort()
            self._idle[peer_id] = fresh
            if not fresh:
                del self._idle[peer_id]

    def close(self) -> None:
        for kept in (kept for some in self._idle.values() for kept in some):
            kept.channel.stream.abort()
        self._idle.clear()


async def exchange(channel: Channel, request: Message, wanted: type[R], payload: bytes = b"") -> R:
    """One request and its answer, which has no payload."""
    await messages.send(channel, request, payload)
    message, _ = await messages.receive(channel, wanted, 0)
    return message
