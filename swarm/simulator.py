"""A seeded swarm in one process: the real rounds, votes, arithmetic and log on a fake network.

Decides latency, loss, churn, partitions, skewed clocks and lies, all from one seed; two runs with
one seed are equal event by event. Knows nothing of sockets and real training: a replica here
pulls a small integer vector toward a goal. Everything else is the code that the live node runs.

Time here is true time; each host reads it through its own skewed clock and corrects that with
swarm.clock. The DHT is a board that hosts write their record to and read from time to time.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from swarm import actions as act
from swarm.actions import Aggregate, Combine, MakeUpdate
from swarm.aggregate import aggregate, clip_scale, combine_groups, norm_limit
from swarm.clock import ClockSample, RunClock
from swarm.deadline import DeadlineRules
from swarm.feedback import only_ours
from swarm.fixed_point import (
    FixedUpdate,
    Ints,
    UpdateError,
    add_into,
    apply_step,
    checked,
    compact,
    norm,
    scaled,
    step_digest,
    weights_digest,
)
from swarm.log import ConsensusLog, Contribution, Entry, MoveMode, genesis
from swarm.round import next_wakeup_s, step
from swarm.round_groups import group_name
from swarm.round_state import RoundRules, RoundState
from swarm.votes import UpdateRef, Vote


class Lie(enum.Enum):
    """What a lying replica does with its update or its vote."""

    NONE = "none"
    SIGN_FLIP = "sign flip"
    SCALE = "scale by 100"
    NOISE = "noise"
    MALFORMED = "malformed"
    REPLAY = "replay of an old update"
    STALE = "an old update under a new name"
    TWO_FACED = "different votes for different peers"
    SILENT = "announces, never delivers"


@dataclass(frozen=True)
class SimRules:
    """The network and the toy problem."""

    latency_s: float = 0.05  # median of a lognormal, one way
    jitter: float = 0.5  # its sigma
    loss: float = 0.0  # of each message and each try of a transfer
    transfer_s: float = 0.1
    poll_s: float = 0.25  # between two reads of the DHT
    polls: int = 8
    size: int = 64
    top_k: int = 8
    learning: float = 0.2
    noise: int = 200
    goal: int = 100_000
    period_s: float = 20.0
    deadline: DeadlineRules = field(default_factory=lambda: DeadlineRules(1.0, 6.0))
    vote_window_s: float = 1.5
    repair_window_s: float = 1.5
    snapshot_every: int = 8

    def rounds(self) -> RoundRules:
        return RoundRules(
            0.0, self.period_s, self.deadline, self.vote_window_s, self.repair_window_s
        )


class Host:
    """One replica: the pure round state, and the numbers that its actions work on."""

    def __init__(self, sim: Simulation, name: str, goal: Ints, lie: Lie, skew_s: float) -> None:
        self.sim, self.name, self.goal, self.lie, self.skew_s = sim, name, goal, lie, skew_s
        self.alive = self.running = True
        self.clock = RunClock()
        zero = np.zeros(sim.rules.size, dtype=np.int32)
        first = genesis("sim", 0, weights_digest(zero))
        log = ConsensusLog((first,), sim.rules.snapshot_every)
        now = sim.round_now()
        warm = now + 1 if now else 0
        self.state = RoundState(name, sim.rules.rounds(), log, warm_until=warm, round=now)
        self.consensus = zero
        self.weights: Ints = zero.astype(np.int64)
        self.progress: Ints = zero.astype(np.int64)  # all that was learned here, for the ledger
        self.versions = {first.digest: zero}
        self.own: dict[UpdateRef, FixedUpdate] = {}
        self.store: dict[bytes, object] = {}
        self.reports: list[act.Report] = []
        self.moves: list[act.MoveTo] = []
        self.old_lie: FixedUpdate | None = None

    # Time

    def now_s(self) -> float:
        return self.clock.run_time_s(self.sim.now_s + self.skew_s)

    def hear(self, event: act.Event) -> None:
        """One event, and all that follows from it. A stopped process hears nothing."""
        if not (self.alive and self.running):
            return
        now = self.now_s()
        before = self.state.round
        self.state, actions = step(self.state, event, now)
        if self.state.round != before:
            self.sim.round_opened(self)
        for action in actions:
            self.act(action)
        self.sim.wake(self, next_wakeup_s(self.state, now) - now)

    def train(self) -> None:
        """A period of local work: toward the goal, with noise."""
        rules = self.sim.rules
        noise = self.sim.numbers.integers(-rules.noise, rules.noise + 1, rules.size)
        gain = ((self.goal - self.weights) * rules.learning).astype(np.int64) + noise
        self.weights = self.weights + gain
        self.progress = self.progress + gain

    def unsent(self) -> Ints:
        return self.weights - self.consensus

    # Actions

    def act(self, action: act.Action) -> None:
        sim = self.sim
        match action:
            case act.MakeUpdate():
                self.make_update(action)
            case act.Announce():
                sim.board[self.name] = act.PeerRecord(
                    self.name,
                    action.round,
                    action.head,
                    action.head_round,
                    action.update,
                    action.size_bytes,
                    action.proposal_s,
                )
            case act.Pull(ref, holders, until_s):
                sim.pull(self, ref, holders, until_s - self.now_s())
            case act.SendVote(vote, to):
                for peer in to:
                    sim.send(self, peer, act.VoteArrived(self.spoken(vote, peer)))
            case act.AskVotes(number, stage, voters, to):
                for peer in to:
                    sim.send(self, peer, act.VotesWanted(self.name, number, stage, voters))
            case act.SendVotes(to_peer, votes):
                for vote in votes:
                    sim.send(self, to_peer, act.VoteArrived(vote))
            case act.Claim(claim, to):
                for peer in to:
                    sim.send(self, peer, claim)
            case act.Aggregate():
                self.aggregate(action)
            case act.Combine():
                self.combine(action)
            case act.Apply(entry):
                change = self.store[entry.step]
                assert isinstance(change, FixedUpdate)
                self.consensus, _ = apply_step(self.consensus, change)
                self.versions[entry.digest] = self.consensus
                add_into(self.weights, change)
                assert weights_digest(self.consensus) == entry.weights
            case act.Settle(ref, scale):
                add_into(self.weights, scaled(self.own[ref], scale), -1)
            case act.ReturnToFeedback(ref, scale):
                if scale:
                    add_into(self.weights, scaled(self.own[ref], scale))
            case act.FetchConsensus(target, have, holders, until_s):
                sim.fetch(self, target, have, holders, until_s - self.now_s())
            case act.MoveTo(head, plan, mode):
                new = self.versions[head.digest]
                if mode is MoveMode.MERGE:
                    assert plan.fork is not None
                    start = self.versions[plan.fork.digest].astype(np.int64)
                    self.weights = self.weights + only_ours(self.consensus - start, new - start)
                if mode is not MoveMode.KEEP:
                    self.weights = self.weights + new - self.consensus
                self.consensus = new
                self.moves.append(action)
            case act.Report():
                self.reports.append(action)

    def make_update(self, action: MakeUpdate) -> None:
        rest = self.unsent()
        for ref in action.in_flight:
            add_into(rest, self.own[ref], -1)
        chosen = np.sort(np.argsort(-np.abs(rest), kind="stable")[: self.sim.rules.top_k])
        honest = FixedUpdate(len(rest), chosen.astype(np.int64), rest[chosen])
        limit = norm_limit(self.state.log.recent_norms())
        if limit is not None:
            honest = scaled(honest, clip_scale(norm(honest), limit))
        update = self.falsified(honest)
        digest = hashlib.blake2b(
            f"{self.name}/{action.round}".encode() + step_digest(update), digest_size=32
        ).digest()
        if self.lie is Lie.REPLAY and self.own:
            digest, update = next((ref.digest, known) for ref, known in self.own.items())
        ref = UpdateRef(digest, self.name)
        self.own[ref], self.store[digest] = honest, update
        self.sim.after(0.05, lambda: self.hear(act.UpdateReady(action.round, ref, 100)))

    def falsified(self, honest: FixedUpdate) -> FixedUpdate:
        values, indices = honest.values, honest.indices
        match self.lie:
            case Lie.SIGN_FLIP:
                return FixedUpdate(honest.size, indices, -values)
            case Lie.SCALE:
                return FixedUpdate(honest.size, indices, values * 100)
            case Lie.NOISE:
                numbers = self.sim.numbers
                places = np.sort(numbers.choice(honest.size, len(values), replace=False))
                spread = max(norm(honest), 1) / max(len(values), 1) ** 0.5
                noise = np.rint(numbers.normal(size=len(values)) * spread).astype(np.int64)
                return FixedUpdate(honest.size, places.astype(np.int64), noise)
            case Lie.MALFORMED:
                return FixedUpdate(honest.size + 1, indices, values)
            case Lie.STALE:
                self.old_lie = self.old_lie or honest
                return self.old_lie
        return honest

    def spoken(self, vote: Vote, peer: str) -> Vote:
        if self.lie is Lie.TWO_FACED and hash_bit(peer):
            return Vote(vote.voter, vote.round, vote.base, vote.base_round, (), vote.stage)
        return vote

    def judged(self, refs: Sequence[UpdateRef]) -> tuple[FixedUpdate, int, list[Contribution]]:
        """The aggregate of these updates, with the past that the log knows."""
        log = self.state.log
        updates = []
        for ref in refs:
            update = self.store[ref.digest]
            assert isinstance(update, FixedUpdate)
            updates.append(update)
        old = self.versions.get(log.entries[max(len(log.entries) - 9, 0)].digest)
        trend = None if old is None else compact(self.consensus.astype(np.int64) - old)
        result = aggregate(
            updates,
            recent_norms=log.recent_norms(),
            trend=trend,
            past_scores=[log.past_scores(ref.sender) for ref in refs],
        )
        scores = result.scores or (0,) * len(refs)
        parts = [
            Contribution(ref.digest, ref.sender, scale, score)
            for ref, scale, score in zip(refs, result.scales, scores, strict=True)
        ]
        return result.delta, result.median_norm, parts

    def aggregate(self, action: Aggregate) -> None:
        delta, median_norm, parts = self.judged(action.refs)
        if action.group is None:
            self.step_ready(action.round, delta, median_norm, parts)
            return
        text = f"{action.round}/{action.group}".encode() + action.base + step_digest(delta)
        for part in parts:
            text += part.digest + part.scale.to_bytes(4, "big")
        digest = hashlib.blake2b(text, digest_size=32).digest()
        self.store[digest] = (delta, median_norm, parts)
        ref = UpdateRef(digest, group_name(action.group))
        self.sim.after(0.02, lambda: self.hear(act.AggregateReady(action.round, ref)))

    def combine(self, action: Combine) -> None:
        deltas, norms, parts = [], [], []
        for ref in action.refs:
            found = self.store[ref.digest]
            assert isinstance(found, tuple)
            delta, median_norm, contributions = found
            deltas.append((delta, sum(c.scale > 0 for c in contributions)))
            norms.append(median_norm)
            parts.extend(contributions)
        middle = sorted(norms)[(len(norms) - 1) // 2]
        self.step_ready(action.round, combine_groups(deltas), middle, parts)

    def step_ready(
        self, number: int, delta: FixedUpdate, median_norm: int, parts: list[Contribution]
    ) -> None:
        consensus, change = apply_step(self.consensus, delta)
        name = step_digest(change)
        self.store[name] = change
        entry = Entry(
            number,
            self.state.log.head.digest,
            weights_digest(consensus),
            name,
            median_norm,
            tuple(sorted(parts, key=lambda c: c.digest)),
        )
        self.sim.after(0.02, lambda: self.hear(act.StepReady(entry)))


def hash_bit(peer: str) -> bool:
    return bool(hashlib.blake2b(peer.encode()).digest()[0] & 1)


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
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.wakes: dict[str, float] = {}
        self.seen: dict[str, dict[str, act.PeerRecord]] = {}
        self.common_goal = self.numbers.integers(-self.rules.goal, self.rules.goal, self.rules.size)

    def round_now(self) -> int:
        return int(self.now_s // self.rules.period_s)

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now_s + max(delay_s, 0.0), self.count, what))

    def at_round(self, number: float, what: Callable[[], None]) -> None:
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
