"""The run's clock on this host: its own, corrected by the median of what its peers' clocks say.

Decides whom to ask and how many answers are kept; the correction is `swarm.clock`'s.
"""

from __future__ import annotations

import asyncio
import time

from node.network import Network
from protocol import messages
from protocol.identity import peer_text
from swarm.clock import ClockSample, RunClock

CLOCKS_KEPT = 64
ASKED = 8
ASK_S = 5.0


class PeerClock:
    """`now_s` is run time: the same for all hosts, as far as they agree."""

    def __init__(self, network: Network, run_id: bytes) -> None:
        self.network, self.run_id = network, run_id
        self.clock = RunClock()

    def now_s(self) -> float:
        return self.clock.run_time_s(time.time())

    async def sample(self) -> None:
        """Ask the peers that were heard last for their time."""
        known = [peer for peer, _ in self.network.discovery.book.latest(ASKED)]
        await asyncio.gather(*(self._ask(peer) for peer in known), return_exceptions=True)
        for peer in list(self.clock.samples)[:-CLOCKS_KEPT]:
            self.clock = self.clock.without(peer)

    async def _ask(self, peer: bytes) -> None:
        sent = time.time()
        answer = await self.network.request(
            peer, messages.Hello(run=self.run_id), messages.HelloReply, deadline_s=ASK_S
        )
        sample = ClockSample(sent, answer.message.now_s, time.time())
        self.clock = self.clock.with_sample(peer_text(peer), sample)
