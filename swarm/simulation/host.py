"""A replica of the simulator: the real round and arithmetic on a small integer vector.

Decides what its training is (a pull toward a goal, with noise) and carries out the round's actions
as the live node does. Knows nothing of latency, loss or who is reachable
(swarm/simulation/simulator.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from swarm.consensus.aggregate import aggregate, clip_scale, combine_groups, norm_limit
from swarm.consensus.feedback import only_ours
from swarm.consensus.fixed_point import (
    FixedUpdate,
    Ints,
    add_into,
    compact,
    norm,
    scaled,
    step_digest,
    weights_digest,
)
from swarm.consensus.log import ConsensusLog, Contribution, Entry, MoveMode, genesis
from swarm.consensus.sums import apply_step
from swarm.consensus.votes import UpdateRef
from swarm.rounds import actions as act
from swarm.rounds.actions import Aggregate, Combine, MakeUpdate
from swarm.rounds.clock import RunClock
from swarm.rounds.deadline import DeadlineRules
from swarm.rounds.round import next_wakeup_s, step
from swarm.rounds.second_stage import group_name
from swarm.rounds.state import RoundRules, RoundState
from swarm.simulation.lies import Lie, falsified, spoken


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


@dataclass(frozen=True, eq=False)
class Judged:
    """The aggregate of a group, or of all groups."""

    delta: FixedUpdate
    median_norm: int
    parts: list[Contribution]
    work: int


class World(Protocol):
    """What a host needs of the network, the board and the clock."""

    rules: SimRules
    numbers: np.random.Generator
    now_s: float
    board: dict[str, act.PeerRecord]

    def round_now(self) -> int: ...

    def after(self, delay_s: float, what: Callable[[], object]) -> None: ...

    def wake(self, host: Host, delay_s: float) -> None: ...

    def round_opened(self, host: Host) -> None: ...

    def send(self, source: Host, to: str, event: act.Event) -> None: ...

    def pull(self, host: Host, ref: UpdateRef, holders: Sequence[str], left_s: float) -> None: ...

    def fetch(
        self, host: Host, target: bytes, have: bytes, holders: Sequence[str], left_s: float
    ) -> None: ...


class Host:
    """One replica: the pure round state, and the numbers that its actions work on."""

    def __init__(self, sim: World, name: str, goal: Ints, lie: Lie, skew_s: float) -> None:
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
        self.first: FixedUpdate | None = None  # our first update, for who says it again

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
                    sim.send(self, peer, act.VoteArrived(spoken(self.lie, vote, peer)))
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
        self.first = self.first or honest
        update = falsified(self.lie, honest, self.sim.numbers)
        if self.lie is Lie.STALE:
            update = self.first
        digest = hashlib.blake2b(
            f"{self.name}/{action.round}".encode() + step_digest(update), digest_size=32
        ).digest()
        if self.lie is Lie.REPLAY and self.own:
            digest, update = next((ref.digest, known) for ref, known in self.own.items())
        ref = UpdateRef(digest, self.name)
        self.own[ref], self.store[digest] = honest, update
        self.sim.after(0.05, lambda: self.hear(act.UpdateReady(action.round, ref, 100)))

    def judged(self, refs: Sequence[UpdateRef]) -> Judged:
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
        return Judged(result.delta, result.median_norm, parts, result.work)

    def aggregate(self, action: Aggregate) -> None:
        judged = self.judged(action.refs)
        if action.group is None:
            self.step_ready(action.round, judged)
            return
        text = f"{action.round}/{action.group}".encode() + action.base + step_digest(judged.delta)
        for part in judged.parts:
            text += part.digest + part.scale.to_bytes(4, "big")
        digest = hashlib.blake2b(text, digest_size=32).digest()
        self.store[digest] = judged
        ref = UpdateRef(digest, group_name(action.group))
        self.sim.after(0.02, lambda: self.hear(act.AggregateReady(action.round, ref)))

    def combine(self, action: Combine) -> None:
        groups = []
        for ref in action.refs:
            found = self.store[ref.digest]
            assert isinstance(found, Judged)
            groups.append(found)
        norms = sorted(group.median_norm for group in groups)
        whole = Judged(
            combine_groups([(group.delta, group.work) for group in groups]),
            norms[(len(norms) - 1) // 2],
            [part for group in groups for part in group.parts],
            sum(group.work for group in groups),
        )
        self.step_ready(action.round, whole)

    def step_ready(self, number: int, judged: Judged) -> None:
        consensus, change = apply_step(self.consensus, judged.delta)
        name = step_digest(change)
        self.store[name] = change
        entry = Entry(
            number,
            self.state.log.head.digest,
            weights_digest(consensus),
            name,
            judged.median_norm,
            tuple(sorted(judged.parts, key=lambda c: c.digest)),
            judged.work,
        )
        self.sim.after(0.02, lambda: self.hear(act.StepReady(entry)))
