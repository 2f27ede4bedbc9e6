"""The run's clock on this host: its own, corrected by the median of what its peers' clocks say.

Decides whom to ask, how many answers are kept, and whether a step of this machine's clock is
followed; the correction is `swarm.clock`'s. Asks by a timer and not by rounds: a host whose clock
is wrong might have no rounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from node.going_on import going_on
from node.network import Network
from protocol import messages
from protocol.errors import WireError
from protocol.identity import peer_text
from swarm.clock import ClockSample, RunClock

_log = logging.getLogger(__name__)

ASKED = 8
ASK_S = 5.0
STEP_S = 1.0  # less than this is no step of a clock, or does not matter
LOOK_S = 5.0  # so often this machine's clock is looked at: has it been set?


class PeerClock:
    """`now_s` is run time: the same for all hosts, as far as they agree."""

    def __init__(self, network: Network, run_id: bytes) -> None:
        self.network, self.run_id = network, run_id
        self.clock = RunClock()

    def now_s(self) -> float:
        return self.clock.run_time_s(self.network.clock())

    async def run(self, every_s: float) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self._until_due(every_s)
            with going_on(_log, "asking peers for their time", WireError):
                await self.sample()

    async def _until_due(self, every_s: float) -> None:
        """Until it is time to ask, or this machine's clock was set."""
        loop, local = asyncio.get_running_loop(), self.network.clock
        due_s, before_s = loop.time() + every_s, local.stepped_s

        def waits() -> bool:
            return loop.time() < due_s and abs(local.stepped_s - before_s) < STEP_S

        while waits():  # noqa: ASYNC110 (nobody tells a process that its clock was set)
            await asyncio.sleep(min(max(due_s - loop.time(), 0.0), LOOK_S))

    async def sample(self) -> None:
        """Ask some peers for their time, those of the best standing."""
        chosen = self.network.discovery.book.trusted(ASKED)
        answers = await asyncio.gather(*(self._ask(peer) for peer in chosen))
        samples = {peer: s for peer, s in zip(chosen, answers, strict=True) if s is not None}
        step_s = self._follow_step(list(samples.values()))
        for peer, s in samples.items():
            sample = ClockSample(s.sent_s + step_s, s.peer_s, s.received_s + step_s)
            self.clock = self.clock.with_sample(peer_text(peer), sample)
        if samples:  # those of before have no say beside better known ones
            for name in set(self.clock.samples) - set(map(peer_text, chosen)):
                self.clock = self.clock.without(name)

    def _follow_step(self, samples: Sequence[ClockSample]) -> float:
        """Take this machine's time of day again if it was set, and most peers say: rightly so.

        Or if there is nobody to ask, who could miss us. By how much our clock changed: the run's
        time, as our peers gave it, did not.
        """
        local = self.network.clock
        stepped_s = local.stepped_s
        nearer = sum(abs(s.offset_s - stepped_s) < abs(s.offset_s) for s in samples)
        if abs(stepped_s) < STEP_S or (samples and 2 * nearer <= len(samples)):
            return 0.0
        _log.warning("the clock of this machine was set by %+.1f s", stepped_s)
        step_s = local.follow()
        self.clock = self.clock.shifted(step_s)
        return step_s

    async def _ask(self, peer: bytes) -> ClockSample | None:
        """One peer's answer, or None."""
        local = self.network.clock
        with going_on(_log, "asking a peer for its time", WireError):
            sent_s = local()
            answer = await self.network.request(
                peer, messages.Hello(run=self.run_id), messages.HelloReply, deadline_s=ASK_S
            )
            return ClockSample(sent_s, answer.message.now_s, local())
        return None
