"""Handing a sweep to the next host: one replica after the other, until somebody has it.

Decides whom to try, how long to wait, and when a block is left out. A sender keeps the sweep until
the receiver has handed it on in turn, so that a host which dies or stalls with it costs one hop's
time. Used by hosts and, for the first hop, by the client. Knows nothing of models.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from node.network import Network
from node.sweep_streams import PeerStream, StreamPool
from protocol.errors import WireError
from protocol.frames import Busy, Refused, Stalled
from protocol.messages import ErrorCode, Message
from protocol.serving import Hop, Mode, Sweep, SweepHanded, SweepTaken, SweepWait

REPORT_S = 5.0  # for a result or a failure on its way to the client
BUSY_WAIT_MIN_S = 0.05
FIRST_LOOK_S = 0.3  # whether a host has handed on what it took; then after twice as long


class NoHost(WireError):
    """None of a hop's replicas took the sweep."""


class NoSession(WireError):
    """A host does not have the caches that the sweep goes on from."""


class Accused(NoHost):
    """Somebody read it and says that it is garbage; the client has heard so."""


class Handover:
    """One node's way to pass sweeps on."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.pool = StreamPool(network)

    async def close(self) -> None:
        await self.pool.close()

    async def to_any(
        self, hop: Hop, sweep: Sweep, payload: bytes, on_taken: Callable[[bytes], None]
    ) -> bytes:
        """Hand over to one of the hop's replicas; who it was. Raises `NoHost` or `NoSession`.

        `on_taken` is called as soon as somebody has all of it. Returns when it has gone further.
        A busy replica is asked again while there is time: the queue before it moves.
        """
        end_s = time.monotonic() + 2 * sweep.hop_s
        reasons: list[str] = []
        accused = False
        peers = list(hop.peers)
        while peers:
            waits: dict[bytes, float] = {}
            for peer in peers:
                try:
                    await self._to(peer, sweep, payload, on_taken)
                    return peer
                except Busy as busy:
                    waits[peer] = busy.retry_after_s
                except WireError as error:
                    if _refused(error, ErrorCode.NOT_FOUND) and sweep.start:
                        raise NoSession(str(error)) from error
                    accused = accused or _refused(error, ErrorCode.NOT_ALLOWED)
                    reasons.append(str(error))
            peers = list(waits)
            wait_s = max(BUSY_WAIT_MIN_S, min(waits.values(), default=0.0))
            if time.monotonic() + wait_s > end_s:
                reasons += ["busy"] * len(peers)
                break
            if peers:
                await asyncio.sleep(wait_s)
        error_type = Accused if accused else NoHost
        raise error_type(f"nobody takes block {hop.block}: {'; '.join(reasons)}")

    async def _to(
        self, peer: bytes, sweep: Sweep, payload: bytes, on_taken: Callable[[bytes], None]
    ) -> None:
        if not self.network.discovery.book.addresses(peer):
            with suppress(WireError):  # only peers with a signed record are dialled
                await self.network.replicas(sweep.block)
        brief = sweep.place == 0 and sweep.mode == Mode.ONE_SWEEP  # a client's whole output
        _, stream = await self.pool.ask(
            peer, sweep, SweepTaken, sweep.hop_s, payload, sweep.block, brief
        )
        on_taken(peer)
        await self._watch(peer, sweep, stream)

    async def _watch(self, peer: bytes, sweep: Sweep, stream: PeerStream) -> None:
        """Return when the peer has handed the sweep on; raise if it died or stalls with it."""
        end_s, wait_s = time.monotonic() + sweep.hop_s, FIRST_LOOK_S
        while True:
            done, _ = await asyncio.wait({stream.lost}, timeout=min(wait_s, sweep.hop_s))
            if done:
                raise stream.lost.result()
            question = SweepWait(sweep=sweep.sweep)
            reply, _ = await self.pool.ask(peer, question, SweepHanded, sweep.hop_s)
            if reply.handed:
                return
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise Stalled("it does not hand the sweep on")
            wait_s = min(2 * wait_s, left_s)

    async def tell(self, client: bytes, message: Message, payload: bytes = b"") -> None:
        """A result or a failure, to the client, over the connection that it has to us."""
        await self.pool.ask(client, message, SweepTaken, REPORT_S, payload)


def _refused(error: WireError, code: ErrorCode) -> bool:
    return isinstance(error, Refused) and error.code == code
