"""A seeded swarm in one process: the real rounds, votes, arithmetic and log on a fake network.

Decides latency, loss, churn, partitions and skewed clocks, all from one seed; two runs with one
seed are equal event by event. Knows nothing of sockets, nor of what a replica does with what it
hears (swarm/simulation/host.py): that is the code that the live node runs.

Time here is true time; each host reads it through its own skewed clock and corrects that with
swarm.rounds.clock. The DHT is a board that hosts write their record to and read from time to time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

import numpy as np

from swarm.consensus.fixed_point import FixedUpdate, UpdateError, checked
from swarm.consensus.log import ConsensusLog
from swarm.consensus.votes import UpdateRef
from swarm.rounds import actions as act
from swarm.rounds.clock import ClockSample
from swarm.simulation.host import Host, SimRules
from swarm.simulation.lies import Lie


class Simulation:
    """The network, the board and the clock. Add hosts, change things at times, run."""

    def __init__(self, seed: int, rules: SimRules | None = None) -> None:
        self.rules = rules or SimRules()
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.now_s = 0.0
        self.hosts: dict[str, Host] = {}
        self.board: dict[str, act.PeerRecord] = {}
        self.sides: dict[str, int] = {}  # a partition: hosts on different sides do not connect
        self.queue: list[tuple[float, int, Callable[[], object]]] = []
        self.count = 0
        self.wakes: dict[str, float] = {}
        self.seen: dict[str, dict[str, act.PeerRecord]] = {}
        self.common_goal = self.numbers.integers(-self.rules.goal, self.rules.goal, self.rules.size)

    def round_now(self) -> int:
        return int(self.now_s // self.rules.period_s)

    def after(self, delay_s: float, what: Callable[[], object]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now_s + max(delay_s, 0.0), self.count, what))

    def at_round(self, number: float, what: Callable[[], object]) -> None:
        """Do something at a (fractional) round."""
        self.after(number * self.rules.period_s - self.now_s, what)

    def add(self, name: str, lie: Lie = Lie.NONE, skew_s: float = 0.0) -> Host:
        spread = self.rules.goal // 10
        own = self.common_goal + self.numbers.integers(-spread, spread, self.rules.size)
        host = self.hosts[name] = Host(self, name, own, lie, skew_s)
        self.seen[name] = {}
        head = host.state.log.head
        ceiling = self.rules.deadline.ceiling_s
        now = self.round_now()
        self.board[name] = act.PeerRecord(name, now, head.digest, head.round, None, 0, ceiling)
        self.after(0.0, lambda: self.sample_clocks(host))
        self.after(1.0, lambda: self.poll(host))
        self.after(0.5, lambda: host.hear(act.Tick()))
        return host

    def run(self, rounds: float) -> None:
        end = rounds * self.rules.period_s
        while self.queue and self.queue[0][0] <= end:
            self.now_s, _, what = heapq.heappop(self.queue)
            what()
        self.now_s = end

    def wake(self, host: Host, delay_s: float) -> None:
        due = self.now_s + max(delay_s, 0.001)
        if self.wakes.get(host.name) == due:
            return
        self.wakes[host.name] = due
        self.after(due - self.now_s, lambda: self._tick(host, due))

    def _tick(self, host: Host, due: float) -> None:
        if self.wakes.get(host.name) == due:
            del self.wakes[host.name]
            host.hear(act.Tick())

    # What the network does

    def latency(self) -> float:
        return self.rules.latency_s * self.rng.lognormvariate(0.0, self.rules.jitter)

    def connected(self, a: str, b: str) -> bool:
        return self.sides.get(a, 0) == self.sides.get(b, 0)

    def reachable(self, a: str, b: str) -> bool:
        other = self.hosts.get(b)
        return other is not None and other.alive and other.running and self.connected(a, b)

    def send(self, source: Host, to: str, event: act.Event) -> None:
        if self.rng.random() < self.rules.loss or not self.connected(source.name, to):
            return
        host = self.hosts.get(to)
        if host is not None:
            self.after(self.latency(), lambda: host.hear(event))

    def pull(self, host: Host, ref: UpdateRef, holders: Sequence[str], left_s: float) -> None:
        """Try the holders one after the other while there is time."""
        spent = 0.0
        for holder in holders:
            spent += 2 * self.latency() + self.rules.transfer_s
            source = self.hosts.get(holder)
            if spent > left_s:
                break
            if source is None or not self.reachable(host.name, holder):
                continue
            if self.rng.random() < self.rules.loss or source.lie is Lie.SILENT:
                continue
            if ref.digest in source.store:
                self._deliver(spent, host, ref, source.store[ref.digest])
                return
        self.after(min(spent, left_s), lambda: host.hear(act.PullFailed(ref)))

    def _deliver(self, delay_s: float, host: Host, ref: UpdateRef, found: object) -> None:
        if isinstance(found, FixedUpdate):
            try:
                found = checked(found, self.rules.size)
            except UpdateError as error:
                self._later(delay_s, host, act.UpdateArrived(ref, error.message))
                return
        host.store[ref.digest] = found  # before it arrives, but nobody looks
        self._later(delay_s, host, act.UpdateArrived(ref))

    def fetch(
        self, host: Host, target: bytes, have: bytes, holders: Sequence[str], left_s: float
    ) -> None:
        spent = 0.0
        for holder in holders:
            spent += 4 * self.latency() + self.rules.transfer_s
            source = self.hosts.get(holder)
            if source is None or not self.reachable(host.name, holder) or spent > left_s:
                continue
            if self.rng.random() < self.rules.loss or target not in source.versions:
                continue
            log = source.state.log
            place = next((i for i, e in enumerate(log.entries) if e.digest == target), None)
            if place is None:
                continue
            chain = ConsensusLog(log.entries[: place + 1]).since(have)
            pinned = tuple(e for e in log.pinned() if e.round <= chain[-1].round)
            host.versions.update({e.digest: source.versions[e.digest] for e in chain})
            self._later(spent, host, act.ConsensusFetched(target, chain, pinned))
            return
        self.after(min(spent, left_s), lambda: host.hear(act.FetchFailed(target)))

    def _later(self, delay_s: float, host: Host, event: act.Event) -> None:
        self.after(delay_s, lambda: host.hear(event))

    # Rounds

    def round_opened(self, host: Host) -> None:
        host.train()
        self.sample_clocks(host)
        for i in range(self.rules.polls):
            self.after(0.1 + (i + self.rng.random()) * self.rules.poll_s, lambda: self.poll(host))

    def poll(self, host: Host) -> None:
        """Read the board: records that are new to this host."""
        if self.rng.random() < self.rules.loss:
            return
        seen = self.seen[host.name]
        new = tuple(
            record
            for peer, record in self.board.items()
            if peer != host.name and self.connected(host.name, peer) and seen.get(peer) != record
        )
        seen.update({record.peer: record for record in new})
        if new:
            host.hear(act.RecordsRead(new))

    def sample_clocks(self, host: Host) -> None:
        """Ask a few peers for their time."""
        others = [p for p in self.hosts if p != host.name and self.reachable(host.name, p)]
        for peer in sorted(self.rng.sample(others, min(8, len(others)))):
            to, back = self.latency(), self.latency()
            local = self.now_s + host.skew_s
            theirs = self.now_s + to + self.hosts[peer].skew_s
            host.clock = host.clock.with_sample(peer, ClockSample(local, theirs, local + to + back))

    # What tests ask

    def heads(self, honest_only: bool = True) -> set[bytes]:
        """The distinct consensuses of the live hosts."""
        return {
            host.state.log.head.digest
            for host in self.hosts.values()
            if host.alive and host.running and (not honest_only or host.lie is Lie.NONE)
        }
