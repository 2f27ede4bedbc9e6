"""When a packet arrives, or that it is lost: rate, queue, delay, jitter, loss of lines and ways.

Decides by arithmetic alone; the time and the randomness are passed in. A packet first waits for
the sender's line, then travels, then waits for the receiver's line: `leave` and `arrive`. Knows
nothing of sockets or addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from benchmarks.wan.topology import Topology


class Line:
    """One direction of a host's access link: a rate and a queue before it, first in first out."""

    __slots__ = ("bytes_per_s", "free_s", "queue_s")

    def __init__(self, mbit: float, queue_ms: float) -> None:
        self.bytes_per_s = mbit * 1e6 / 8
        self.queue_s = queue_ms / 1e3
        self.free_s = 0.0  # when the last packet that was accepted is through

    def through_s(self, size_bytes: int, now_s: float) -> float | None:
        """When the packet is through; None if the queue is full."""
        start_s = self.free_s if self.free_s > now_s else now_s
        if start_s - now_s > self.queue_s:
            return None
        self.free_s = start_s + size_bytes / self.bytes_per_s
        return self.free_s


class Way:
    """From one host to another: delay, jitter and loss. Later packets do not arrive earlier."""

    __slots__ = ("cut", "delay_s", "jitter_s", "last_s", "loss")

    def __init__(self, delay_s: float, jitter_s: float, loss: float) -> None:
        self.delay_s, self.jitter_s, self.loss = delay_s, jitter_s, loss
        self.last_s = 0.0
        self.cut = False

    def arrives_s(self, left_s: float, luck: float) -> float:
        arrival_s = left_s + self.delay_s + self.jitter_s * luck
        if arrival_s < self.last_s:
            arrival_s = self.last_s
        self.last_s = arrival_s
        return arrival_s


class Wan:
    """All lines and ways of a topology, by the places of its hosts."""

    def __init__(self, topology: Topology, random: Random) -> None:
        hosts = topology.hosts
        self.random = random
        self.up = [Line(h.link.up_mbit, h.link.queue_ms) for h in hosts]
        self.down = [Line(h.link.down_mbit, h.link.queue_ms) for h in hosts]
        self.ways: list[list[Way]] = []
        for one in hosts:
            row = []
            for other in hosts:
                route = topology.between(one.name, other.name)
                # Kept: past the sender's line, the way and the receiver's line.
                kept = (1 - one.link.loss_percent / 100) * (1 - other.link.loss_percent / 100)
                kept *= 1 - route.loss_percent / 100
                row.append(Way(route.rtt_ms / 2e3, route.jitter_ms / 1e3, 1 - kept))
            self.ways.append(row)

    def cut(self, apart: Sequence[int]) -> None:
        """Nothing passes between these hosts and the others any more, until `heal`."""
        for one, row in enumerate(self.ways):
            for other, way in enumerate(row):
                way.cut = way.cut or (one in apart) != (other in apart)

    def heal(self) -> None:
        for row in self.ways:
            for way in row:
                way.cut = False
