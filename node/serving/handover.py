"""Hand a sweep to the next hop: try its replicas one after another until one has taken it.

A busy host is asked again while there is time; one that dies or stalls costs one hop's timeout. To
be able to retry, the sender keeps the sweep until the receiver has handed it on. Used by hosts and,
for the first hop, by the client.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from node.network.network import Network
from node.serving.streams import PeerStream, ServingStreams
from protocol.errors import WireError
from protocol.frames import Busy, Refused, Stalled, Truncated
from protocol.messages import ErrorCode, Message
from protocol.serving import Hop, Mode, Sweep, SweepHanded, SweepTaken, SweepWait

REPORT_S = 5.0  # for a result or a failure on its way to the client
BUSY_WAIT_MIN_S, BUSY_WAIT_MAX_S = 0.05, 2.0
FIRST_LOOK_S = 0.15  # until the first check whether a host has handed on; then twice as long
LOOK_MAX_S = 2.0


class NoHost(WireError):
    """None of a hop's replicas took the sweep."""


class NoSession(WireError):
    """The replicas do not have the caches or the version that the sweep needs (any more)."""


class Accused(NoHost):
    """A replica rejected the payload as malformed, and has told the client so."""


class Crowded(WireError):
    """All remaining replicas answered busy until the deadline."""


class Line:
    """The stream on which all parts of one sweep are sent, and the lock that keeps their order."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # fair: waiters get it in order
        self.stream: PeerStream | None = None


def _nothing() -> None:
    """The default callback."""


class Handover:
    """Hands sweeps of one node to other peers, or to itself."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.pool = ServingStreams(network)
        # A host of several blocks keeps a sweep that goes on to itself: it cannot dial itself.
        self.keep: Callable[[Sweep, bytes], Awaitable[None]] | None = None
        self._rng = random.Random()

    async def close(self) -> None:
        await self.pool.close()

    async def to_any(
        self,
        hop: Hop,
        sweep: Sweep,
        payload: bytes,
        end_s: float,
        on_taken: Callable[[], None] = _nothing,
        on_busy: Callable[[], None] = _nothing,
    ) -> bytes:
        """Hand the sweep to one of the hop's replicas, and return which.

        Calls `on_taken` when a replica has received it, and returns when that has handed it on.
        Raises `NoHost`, `NoSession`, or `Crowded` if all are busy until `end_s`.
        """
        errors: list[WireError] = []
        # Only the first peer has the caches that the sweep continues: wait for that one.
        peers = list(hop.peers[:1] if sweep.start else hop.peers)
        while peers:
            waits: dict[bytes, float] = {}
            for peer in peers:
                try:
                    await self._to(peer, sweep, payload, end_s, on_taken)
                    return peer
                except Busy as busy:
                    waits[peer] = busy.retry_after_s
                    on_busy()
                except Crowded:
                    raise
                except WireError as error:
                    errors.append(error)
            peers = list(waits)
            if peers:
                await self._wait(min(waits.values()), end_s, f"the hosts of block {hop.block} are")
        reasons = "; ".join(map(str, errors))
        if any(_refused(error, ErrorCode.NOT_ALLOWED) for error in errors):
            raise Accused(f"nobody takes block {hop.block}: {reasons}")
        if sweep.start or any(_refused(error, ErrorCode.NOT_FOUND) for error in errors):
            raise NoSession(f"block {hop.block}: {reasons}")
        raise NoHost(f"nobody takes block {hop.block}: {reasons}")

    async def _wait(self, said_s: float, end_s: float, who: str) -> None:
        """Wait as long as a busy host asked for, plus a random share to spread the retries."""
        wait_s = min(max(said_s, BUSY_WAIT_MIN_S), BUSY_WAIT_MAX_S) * self._rng.uniform(1.0, 1.5)
        if time.monotonic() + wait_s > end_s:
            raise Crowded(f"{who} busy")
        await asyncio.sleep(wait_s)

    async def _to(
        self,
        peer: bytes,
        sweep: Sweep,
        payload: bytes,
        end_s: float,
        on_taken: Callable[[], None],
    ) -> None:
        if self.keep is not None and peer == self.network.peer_id:
            await self.keep(sweep, payload)
            on_taken()
            return
        await self._find(peer, sweep)
        brief = sweep.place == 0 and sweep.mode != Mode.VERIFY  # a client's whole output
        _, stream = await self.pool.ask(
            peer, sweep, SweepTaken, sweep.hop_s, payload, sweep.block, brief
        )
        on_taken()
        await self._watch(peer, sweep, end_s, stream)

    async def part(
        self,
        hop: Hop,
        sweep: Sweep,
        payload: bytes,
        end_s: float,
        line: Line,
        on_taken: Callable[[], None],
    ) -> None:
        """Hand over one part to the hop's first peer, which has the caches of the parts before.

        To be called in the order of the parts. Raises a `WireError`; then the sweep is lost. For
        the last part it returns when the peer has handed that on.
        """
        peer = hop.peers[0]
        if self.keep is not None and peer == self.network.peer_id:
            async with line.lock:
                await self.keep(sweep, payload)
            on_taken()
            return
        async with line.lock:
            if line.stream is None:
                await self._find(peer, sweep)
                line.stream = await self.pool.with_room(peer, sweep.hop_s, sweep.parts)
            stream = line.stream
            stream.assign()
            asking = asyncio.create_task(stream.ask(sweep, SweepTaken, sweep.hop_s, payload))
        try:
            await asking
        finally:
            self.pool.book(peer, stream, sweep.block)
        on_taken()
        if sweep.part == sweep.parts - 1:
            await self._watch(peer, sweep, end_s, stream)

    async def _find(self, peer: bytes, sweep: Sweep) -> None:
        if not self.network.discovery.book.addresses(peer):
            with suppress(WireError):  # only peers with a signed record are dialled
                await self.network.replicas(sweep.block)

    async def _watch(self, peer: bytes, sweep: Sweep, end_s: float, stream: PeerStream) -> None:
        """Return when the peer has handed the sweep on; raise if it died or stalls.

        It stalls if its queue has not moved for a hop's timeout.
        """
        stalled_s, wait_s, moves = time.monotonic() + sweep.hop_s, FIRST_LOOK_S, 0
        while True:
            done, _ = await asyncio.wait({stream.lost}, timeout=min(wait_s, sweep.hop_s))
            if done:
                raise stream.lost.result()
            handed = await self._ask_handed(peer, sweep)
            if handed.handed:
                return
            now_s = time.monotonic()
            if handed.moves > moves:
                moves, stalled_s = handed.moves, now_s + sweep.hop_s
            if now_s >= stalled_s:
                raise Stalled("it does not hand the sweep on")
            if now_s >= end_s:
                raise Crowded(f"the queue of block {sweep.block} is too long")
            wait_s = min(2 * wait_s, stalled_s - now_s, LOOK_MAX_S)

    async def _ask_handed(self, peer: bytes, sweep: Sweep) -> SweepHanded:
        question = SweepWait(sweep=sweep.sweep)
        try:
            reply, _ = await self.pool.ask(peer, question, SweepHanded, sweep.hop_s)
        except Busy:  # the peer has no place for our stream now: ask again later
            return SweepHanded(handed=0)
        return reply

    async def tell(self, client: bytes, message: Message, payload: bytes = b"") -> None:
        """Send a result or a failure to the client, over its connection to us.

        The client waits for nothing else, so we retry while it is busy, and once if the stream had
        just ended.
        """
        end_s, attempts = time.monotonic() + REPORT_S, 2
        while True:
            try:
                await self.pool.ask(client, message, SweepTaken, REPORT_S, payload)
                return
            except Busy as busy:
                await self._wait(busy.retry_after_s, end_s, "the client is")
            except Truncated:
                attempts -= 1
                if not attempts:
                    raise


def _refused(error: WireError, code: ErrorCode) -> bool:
    return isinstance(error, Refused) and error.code == code
