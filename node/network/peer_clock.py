"""The run's clock on this host: its own, corrected by the median of what its peers' clocks say.

Decides whom to ask, how many answers are kept, and whether a step of this machine's clock is
followed; the correction is `swarm.rounds.clock`'s. Asks by a timer and not by rounds: a host whose
clock is wrong might have no rounds.

A step that nobody could speak for or against is followed in the end: most likely it was right, and
whoever comes next would take us for wrong. Peers that come back have the last word on it.

Known limit: a host that followed a wrong step alone has rounds of another time until somebody
answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from node.machine.going_on import going_on
from node.network.network import Network
from protocol import messages
from protocol.errors import WireError
from protocol.identity import peer_text
from swarm.rounds.clock import ClockSample, RunClock

_log = logging.getLogger(__name__)

ASKED = 8
ASK_S = 5.0
STEP_S = 1.0  # less than this is no step of a clock, or does not matter
LOOK_S = 5.0  # so often this machine's clock is looked at: has it been set?
SILENT = 5  # times in a row that no peer answered: then a step is followed without their word
AGAIN_S = 20.0  # after one of them: most likely only the network is away for a moment


class PeerClock:
    """`now_s` is run time: the same for all hosts, as far as they agree."""

    def __init__(self, network: Network, run_id: bytes) -> None:
        self.network, self.run_id = network, run_id
        self.clock = RunClock()
        self._unanswered = 0  # times in a row, while a step waits for the peers' word
        self._unproven_s = 0.0  # what was followed without it

    def now_s(self) -> float:
        return self.clock.run_time_s(self.network.clock())

    async def run(self, every_s: float) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self._until_due(min(every_s, AGAIN_S) if self._unanswered else every_s)
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
        step_s = self._set_local(len(chosen), list(samples.values()))
        for peer, s in samples.items():
            sample = ClockSample(s.sent_s + step_s, s.peer_s, s.received_s + step_s)
            self.clock = self.clock.with_sample(peer_text(peer), sample)
        if samples:  # those of before have no say beside better known ones
            for name in set(self.clock.samples) - set(map(peer_text, chosen)):
                self.clock = self.clock.without(name)

    def _set_local(self, asked: int, samples: Sequence[ClockSample]) -> float:
        """Follow a step of this machine's clock, or go back on one; by how much ours changed.

        The run's time, as our peers gave it, does not change with it.
        """
        step_s = self._as_most_say(samples) if samples else self._by_ourselves(asked)
        if samples or step_s:
            self._unanswered = 0
        self.clock = self.clock.shifted(step_s) if step_s else self.clock
        return step_s

    def _by_ourselves(self, asked: int) -> float:
        """Silence is no word: peers may be there again in a moment. Follow only if it lasts, or
        if there is nobody to ask."""
        if abs(self.network.clock.stepped_s) < STEP_S:
            self._unanswered = 0
            return 0.0
        self._unanswered += 1
        if asked and self._unanswered < SILENT:
            return 0.0
        step_s = self._follow()
        self._unproven_s += step_s
        return step_s

    def _as_most_say(self, samples: Sequence[ClockSample]) -> float:
        """Take this machine's time of day again if most peers say that it is rightly set; give up
        what we followed without them if they say that it was not."""
        local, unproven_s = self.network.clock, self._unproven_s
        if abs(local.stepped_s) >= STEP_S and 2 * _nearer(samples, local.stepped_s) > len(samples):
            return self._follow()
        against = _nearer(samples, -unproven_s)
        if 2 * against <= len(samples):
            if 2 * against < len(samples) > 1:  # one alone does not settle it for good
                self._unproven_s = 0.0
            return 0.0
        self._unproven_s = 0.0
        _log.warning("peers are back: the clock was set wrongly by %+.1f s", unproven_s)
        local.give_up(unproven_s)
        return -unproven_s

    def _follow(self) -> float:
        local = self.network.clock
        _log.warning("the clock of this machine was set by %+.1f s", local.stepped_s)
        return local.follow()

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


def _nearer(samples: Sequence[ClockSample], by_s: float) -> int:
    """How many peers' clocks ours would be nearer to, if it were set by so much."""
    return sum(abs(s.offset_s - by_s) < abs(s.offset_s) for s in samples)
