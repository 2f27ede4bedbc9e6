"""A host's network whose peers are other hosts of the simulated world.

It is the live `Network` (records, address book, standings, ledger, handlers) with other ways to a
peer: a question is a call of the other host's handler after the time that it would have taken on
the way, and the DHT is one table for all. Frames, streams and places (`node.network.service`) have
no part in it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from node.machine.steady_time import SteadyTime
from node.network.daemon import Daemon, DaemonSettings
from node.network.dht import Lookup
from node.network.gate import Unreachable
from node.network.network import Answer, Network, NetworkSettings
from node.network.ring import Ring
from node.network.service import Reply, Status, refusal
from node.network.transport import Transport
from protocol.admission import RecordTable
from protocol.frames import (
    Chunks,
    DigestMismatch,
    Oversize,
    Sink,
    Stalled,
    Tally,
    content_digest,
    encode_head,
)
from protocol.identity import peer_text
from protocol.limits import CONTROL_DEADLINE_S, DIGEST_BYTES, STALL_S
from protocol.messages import Message, expect, purpose_of
from protocol.records import SignedRecord

R = TypeVar("R", bound=Message)

STORED_ON = 5  # nodes that a record is said to be on


class SimWorld(Protocol):
    """What a simulated network needs of the world around it."""

    table: RecordTable  # the DHT

    def network_of(self, peer_id: bytes) -> SimNetwork | None:
        """The network of a host that is there, whether or not it can be reached."""

    async def carry(self, source: bytes, target: bytes, size_bytes: int) -> bool:
        """Let the time pass that so many bytes take from one host to another.

        False if nobody is there. Never returns if they are lost or the way is cut.
        """

    def can_reach(self, source: bytes, target: bytes) -> bool: ...


class SimNetwork(Network):
    """Made for one host; see `Network`."""

    def __init__(
        self,
        world: SimWorld,
        address: str,
        clock: SteadyTime,
        settings: NetworkSettings,
        status: Callable[[], Status],
        say: Callable[[str], None],
        rng: random.Random,
    ) -> None:
        super().__init__(settings, status, say, rng, clock=clock)
        self.world, self.address = world, address

    async def _open(self, port: int) -> None:
        daemon = _NoDaemon(self.settings.daemon, self.world, self.peer_id, self.address)
        self.discovery.use(_Table(self.world, self.peer_id, self.clock), daemon.transport)
        self._daemon = daemon

    async def request(
        self,
        peer_id: bytes,
        request: Message,
        wanted: type[R],
        *,
        deadline_s: float = CONTROL_DEADLINE_S,
        stall_s: float = STALL_S,
        max_payload_bytes: int | None = None,
        expected: bytes | None = None,
        sink: Sink | None = None,
        again_soon: bool = False,
    ) -> Answer[R]:
        try:
            async with asyncio.timeout(deadline_s):
                message, payload = await self._ask(peer_id, request, max_payload_bytes)
        except TimeoutError:
            raise Stalled("no answer before the deadline") from None
        answer = expect(message, wanted)
        digest = content_digest(payload) if payload else b""
        if expected is not None and digest != expected:
            raise DigestMismatch("another payload than was asked for")
        if sink is not None:
            sink(payload)
        self.standings.spoke(peer_id)
        return Answer(answer, bytearray(b"" if sink else payload), digest, self.address)

    async def _ask(
        self, peer_id: bytes, request: Message, max_payload_bytes: int | None
    ) -> tuple[Message, bytes]:
        """There, answered, and back; both ledgers have what both frames would have been."""
        purpose, block = purpose_of(request)
        asked = _frame_bytes(request, 0)
        there = await self.world.carry(self.peer_id, peer_id, asked)
        other = self.world.network_of(peer_id) if there else None
        if other is None:
            raise Unreachable("nobody answers at its addresses")
        try:
            reply = await other.service.reply_to(request, self.peer_id)
            payload = _whole(reply)
        except Exception as error:  # as the live service does: what failed is said, not raised
            reply, payload = Reply(refusal(error)), b""
        size = _frame_bytes(reply.message, len(payload))
        if max_payload_bytes is not None and len(payload) > max_payload_bytes:
            raise Oversize(f"a payload of {len(payload)} bytes")
        await self.world.carry(peer_id, self.peer_id, size)
        self.ledger.book(Tally(size, asked, 1, 1), peer_text(peer_id), purpose, block)
        other.ledger.book(Tally(asked, size, 1, 1), peer_text(self.peer_id), purpose, block)
        return reply.message, payload


def _whole(reply: Reply) -> bytes:
    if isinstance(reply.payload, Chunks):
        return b"".join(bytes(part) for part in reply.payload.parts)
    return bytes(reply.payload)


def _frame_bytes(message: Message, payload_bytes: int) -> int:
    head = len(encode_head(message.KIND, message.to_header(), payload_bytes))
    return head + (payload_bytes + DIGEST_BYTES if payload_bytes else 0)


class _NoDaemon(Daemon):
    """Stands where p2pd would: it has no process."""

    def __init__(self, settings: DaemonSettings, world: SimWorld, me: bytes, address: str) -> None:
        super().__init__(settings, Path("/nowhere"))
        self.peer_id, self.port = me, 4001
        self.transport = _Ways(world, me, address)

    async def ended(self) -> int:
        await asyncio.Event().wait()
        return 0

    async def stop(self) -> None:
        pass


class _Ways(Transport):
    """Connections of a simulated host: there are none to keep."""

    def __init__(self, world: SimWorld, me: bytes, address: str) -> None:
        super().__init__(Path("/nowhere"), Path("/nowhere"))
        self.world, self.me, self.address = world, me, address

    async def connect(self, peer_id: bytes, known: Iterable[str], timeout_s: float) -> None:
        if not await self.world.carry(self.me, peer_id, 0):
            raise Unreachable("nobody answers at its addresses")

    async def own_addresses(self) -> list[str]:
        return [self.address]

    async def connected(self) -> dict[bytes, list[str]]:
        return {}


class _Table(Ring):
    """The DHT as a host sees it: one table, of which it reads the records of whom it can reach."""

    def __init__(self, world: SimWorld, me: bytes, clock: Callable[[], float]) -> None:
        self.world, self.me, self.clock = world, me, clock
        self._met: set[bytes] = set()

    @property
    def size(self) -> int:
        return len(self._met)

    def neighbours(self) -> list[bytes]:
        return sorted(self._met)

    async def meet(self, peer_id: bytes) -> bool:
        found = self.world.can_reach(self.me, peer_id) and await self.world.carry(
            self.me, peer_id, 0
        )
        (self._met.add if found else self._met.discard)(peer_id)
        return found

    async def find(self, keys: list[bytes], lookup: Lookup) -> list[bytes]:
        now_s = self.clock()
        found = [s for key in keys for s in self.world.table.entries(key, now_s)]
        near = [s for s in found if s.peer_id == self.me or self._reaches(s.peer_id)]
        await self._round_trip()
        lookup.add([(s.key, s.subkey, s.value, s.expiration_s) for s in near])
        return []

    async def store(self, signed: SignedRecord) -> int:
        await self._round_trip()
        return STORED_ON if self.world.table.offer(signed, self.clock()).kept else 0

    def _reaches(self, peer_id: bytes) -> bool:
        return self.world.can_reach(self.me, peer_id)

    async def _round_trip(self) -> None:
        await self.world.carry(self.me, self.me, 0)
        await self.world.carry(self.me, self.me, 0)
