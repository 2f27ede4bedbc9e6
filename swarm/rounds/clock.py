"""The run's clock: which round it is, on a machine whose own clock may be off.

The correction to the local clock is the median of the peers' offsets and our own of 0. So all
replicas arrive at the same clock, the median one, and a minority of wrong or lying clocks moves
none of them. A majority moves us by MAX_OFFSET_S at most, which is also how far off a joining
host's clock may be. If the local clock is set, `shifted` moves the samples with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

MAX_OFFSET_S = 120.0
SAMPLES_PER_PEER = 8


@dataclass(frozen=True)
class ClockSample:
    """One request for a peer's time: our clock at request and answer, and the peer's clock.

    The shorter the round trip, the better the estimate.
    """

    sent_s: float
    peer_s: float
    received_s: float

    @property
    def way_s(self) -> float:
        return self.received_s - self.sent_s

    @property
    def offset_s(self) -> float:
        return self.peer_s - (self.sent_s + self.received_s) / 2


@dataclass(frozen=True)
class RunClock:
    """Converts local time to run time. Immutable: `with_sample` gives the next one."""

    samples: Mapping[str, tuple[ClockSample, ...]] = field(default_factory=dict)

    def with_sample(self, peer: str, sample: ClockSample) -> RunClock:
        """Add a sample; impossible ones (answered before asked, too far off) are ignored."""
        if sample.way_s < 0 or not abs(sample.offset_s) <= MAX_OFFSET_S:
            return self
        kept = (*self.samples.get(peer, ()), sample)[-SAMPLES_PER_PEER:]
        return RunClock({**self.samples, peer: kept})

    def without(self, peer: str) -> RunClock:
        return RunClock({name: s for name, s in self.samples.items() if name != peer})

    def shifted(self, by_s: float) -> RunClock:
        """The clock that gives the same run time after the local clock was set by `by_s`."""
        moved = RunClock()
        for peer, samples in self.samples.items():
            for s in samples:
                after = ClockSample(s.sent_s + by_s, s.peer_s, s.received_s + by_s)
                moved = moved.with_sample(peer, after)
        return moved

    @cached_property
    def correction_s(self) -> float:
        """Lower median of our own 0 and the peers' offsets, each from its quickest sample."""
        offsets = [0.0]
        for samples in self.samples.values():
            offsets.append(min(samples, key=lambda s: s.way_s).offset_s)
        return sorted(offsets)[(len(offsets) - 1) // 2]

    def run_time_s(self, local_s: float) -> float:
        return local_s + self.correction_s


def round_at(now_s: float, start_s: float, period_s: float) -> int:
    """The round whose exchange runs at this time; 0 in the first period."""
    return int((now_s - start_s) // period_s)


def exchange_opens_s(number: int, start_s: float, period_s: float) -> float:
    """When the exchange of a round begins; it sends what was learned in the period before."""
    return start_s + number * period_s
