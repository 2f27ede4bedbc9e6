"""Replicas in one process, on a network of function calls: the real rounds, arithmetic and checks.

Trainers here are vectors that walk toward a goal. What is tested is what a live replica adds to the
pure round: the ledger of its weights over crashes and resumes, and what it takes from strangers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from liar import Lie, liar
from virtual_time import run_virtually

from node.canary import CanaryWatch
from node.exchange import Held, ReplicaSettings
from node.replica import Replica
from node.replica_service import serve_replica
from node.running_weights import Moment
from node.service import Reply
from node.trainer import TrainerError
from protocol import messages
from protocol.errors import WireError
from protocol.frames import Oversize, Refused, Stalled, content_digest
from protocol.identity import Identity, load_or_create
from protocol.messages import Message
from swarm import actions as act
from swarm.deadline import DeadlineRules
from swarm.feedback import unsent
from swarm.fixed_point import to_float
from swarm.flat import Floats
from swarm.log import Entry
from swarm.round_state import RoundRules
from swarm.updates import UpdateCodec
from swarm.votes import UpdateRef

SIZE = 512
PERIOD_S = 0.6
RUN = content_digest(b"test run")
QUANTUM = 2.0**-24


class Toy:
    """A trainer: in every round its weights go a part of the way to its goal."""

    def __init__(self, seed: int) -> None:
        common = np.random.default_rng(0).normal(size=SIZE)
        self.goal = (common + np.random.default_rng(seed).normal(size=SIZE) / 10).astype(np.float32)
        self.weights = np.zeros(SIZE, dtype=np.float32)
        self.alive, self.learns = True, True
        self.evaluations = 0
        self.before_snapshot: Callable[[], Awaitable[None]] | None = None

    def train(self) -> None:
        if self.learns:
            self.weights = (self.weights + 0.05 * (self.goal - self.weights)).astype(np.float32)

    def _check(self) -> None:
        if not self.alive:
            raise TrainerError("the training process died")

    async def snapshot(self) -> Floats:
        self._check()
        return self.weights.copy()

    async def correct(self, change: Floats) -> None:
        self._check()
        self.weights = self.weights + change

    async def replace(self, flat: Floats) -> None:
        self._check()
        self.weights = flat.copy()

    async def evaluate(self, flat: Floats) -> float:
        """How far from the goal: what stands for the CE."""
        self._check()
        self.evaluations += 1
        return float(np.mean((flat - self.goal) ** 2))


class Swarm:
    """A network of function calls. A peer that is `down` does not answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.members: dict[str, Member] = {}
        self.down: set[str] = set()
        self.last: int | None = None  # the last exchange of the run
        # Not at the very start of a round: whoever is added now takes part from the next one on.
        self.start_s = asyncio.get_running_loop().time() - 0.3 * PERIOD_S

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.start_s

    async def ask(
        self,
        peer: str,
        request: Message,
        wanted: type[Any],
        deadline_s: float,
        max_payload_bytes: int | None = None,
    ) -> tuple[Any, bytes]:
        await asyncio.sleep(0)
        if peer in self.down or peer not in self.members:
            raise Stalled("nobody there")
        member = self.members[peer]
        reply: Reply = await member.handlers[type(request)](request, b"")
        payload = bytes(reply.payload) if not callable(reply.payload) else b""
        if max_payload_bytes is not None and len(payload) > max_payload_bytes:
            raise Oversize(f"{len(payload)} bytes")
        return reply.message, payload

    def add(self, name: str, kind: type[Replica] = Replica) -> Member:
        member = Member(self, name, kind)
        self.members[member.replica.me] = member
        return member

    async def until(self, condition: Callable[[], Any], limit_s: float = 30.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


class Member:
    """A replica with its toy trainer, its board and its ear."""

    def __init__(self, swarm: Swarm, name: str, kind: type[Replica]) -> None:
        self.swarm, self.name = swarm, name
        self.identity: Identity = load_or_create(swarm.folder / f"{name}.key")
        self.toy = Toy(sum(name.encode()))
        self.reports: list[act.Report] = []
        self.entries: list[Entry] = []
        self.moves: list[act.MoveTo] = []
        self.exclusions: list[str] = []
        self.reasons: list[str] = []
        self.losses_nats: list[float] = []
        self.canary: CanaryWatch | None = None
        self.losses: list[str] = []
        self.told_crowded = 0
        self.handlers: dict[type, Any] = {}
        rules = RoundRules(0.0, PERIOD_S, DeadlineRules(0.15, 0.2), 0.08, 0.07, swarm.last)
        settings = ReplicaSettings(RUN, 0, rules, UpdateCodec("topk:0.1:8", SIZE), 4)
        zero = np.zeros(SIZE, dtype=np.float32)
        self.replica = kind(settings, self.identity, zero, swarm, self, self.toy, swarm.now_s, self)
        serve_replica(self, self.replica, lambda s: None, list, lambda: 0.0)  # type: ignore[arg-type]
        self.tasks: list[asyncio.Task[None]] = []

    def start(self) -> Member:
        self.tasks = [
            asyncio.create_task(self.replica.running.queue.run()),
            asyncio.create_task(self.replica.run()),
        ]
        return self

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.identity.close()

    def serve(self, kind: type, handler: Any, bulk: bool = False) -> None:
        self.handlers[kind] = handler

    # Board

    async def publish(
        self, announcement: act.Announce, quiet: Callable[[], Awaitable[None]]
    ) -> None:
        a, me = announcement, self.replica.me
        record = act.PeerRecord(
            me, a.round, a.head, a.head_round, a.update, a.size_bytes, a.proposal_s
        )
        for peer, member in self.swarm.members.items():
            if peer != me and peer not in self.swarm.down and me not in self.swarm.down:
                member.replica.hear(record)

    # Listener

    def round_began(self, number: int) -> None:
        self.toy.train()

    def reported(self, report: act.Report, update_bytes: int) -> None:
        self.reports.append(report)

    def stepped(self, entry: Entry) -> None:
        self.entries.append(entry)
        if self.canary is not None:
            self.tasks.append(asyncio.create_task(self._look(self.canary)))

    async def _look(self, canary: CanaryWatch) -> None:
        loss = await canary.look()
        if loss is not None:
            self.losses_nats.append(loss)

    def moved(self, move: act.MoveTo, before: bytes) -> None:
        self.moves.append(move)

    def excluded(self, peer: str, until_round: int, reason: str) -> None:
        self.exclusions.append(peer)
        self.reasons.append(reason)

    def weights_lost(self, why: str) -> None:
        self.losses.append(why)

    def crowded(self) -> None:
        self.told_crowded += 1

    # What tests ask

    @property
    def head(self) -> Entry:
        return self.replica.state.log.head

    def unsent(self) -> Floats:
        return self.toy.weights - to_float(self.replica.consensus.weights)


def run(work: Callable[[Swarm], Awaitable[None]], folder: Path) -> None:
    async def main() -> None:
        swarm = Swarm(folder)
        try:
            async with asyncio.timeout(60.0):
                await work(swarm)
        finally:
            for member in swarm.members.values():
                await member.stop()

    run_virtually(main())


def same_head(members: list[Member]) -> bool:
    return len({m.head.digest for m in members}) == 1


def test_three_learn_the_same_and_a_latecomer_catches_up_from_a_snapshot(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        first = [swarm.add(name).start() for name in "abc"]
        await swarm.until(lambda: first[0].head.round >= 9)
        assert all(len(m.entries[-1].contributions) == 3 for m in first)
        late = swarm.add("late").start()
        everybody = [*first, late]
        await swarm.until(lambda: late.moves and same_head(everybody))
        assert late.moves[0].plan.snapshot is not None
        number = late.head.round
        await swarm.until(lambda: len(late.head.contributions) == 4 and late.head.round > number)
        # Closer to the common goal than where it began.
        consensus = to_float(late.replica.consensus.weights)
        goal = np.random.default_rng(0).normal(size=SIZE)
        assert np.linalg.norm(consensus - goal) < 0.9 * np.linalg.norm(goal)
        # What is kept is bounded.
        assert len(first[0].replica.exchange._held) <= 3 * 4
        assert len(first[0].replica.consensus.steps) <= 8
        assert len(first[0].replica.running.own._made) <= 17

    run(work, tmp_path)


def test_alone_every_round_is_decided(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        alone = swarm.add("a").start()
        await swarm.until(lambda: len(alone.reports) >= 5)
        assert {r.outcome for r in alone.reports[1:]} == {"decided"}
        assert all(r.included for r in alone.reports[1:])

    run(work, tmp_path)


def test_a_lost_trainer_costs_its_unsent_steps_and_undoes_nothing(tmp_path: Path) -> None:
    """Lost while its update is in flight: the weights are set so that settling it leaves zero."""

    async def work(swarm: Swarm) -> None:
        a, b = swarm.add("a").start(), swarm.add("b").start()
        await swarm.until(lambda: a.head.round >= 3 and same_head([a, b]))
        await swarm.until(lambda: bool(a.replica.state.in_flight))
        a.toy.alive = a.toy.learns = False
        a.replica.running.queue.lose("killed")
        a.toy.weights = np.full(SIZE, 7.0, dtype=np.float32)  # a new process knows nothing
        number = a.head.round
        await swarm.until(lambda: a.head.round > number)  # decided while there is no trainer
        a.toy.alive = True
        a.replica.reset_weights()
        await swarm.until(lambda: not a.replica.running.queue.lost)
        await swarm.until(lambda: not a.replica.state.in_flight)
        number = a.head.round
        await swarm.until(lambda: a.head.round >= number + 2 and not a.replica.state.in_flight)
        # The correction of a step is queued: the head is ahead of the weights for a moment.
        await swarm.until(lambda: bool(np.abs(a.unsent()).max() < 64 * QUANTUM))
        assert same_head([a, b]) or a.head.round != b.head.round

    run(work, tmp_path)


def test_reset_keeps_what_is_in_flight(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        a = swarm.add("a").start()
        await swarm.until(lambda: a.head.round >= 2)
        a.toy.learns = False
        await swarm.until(lambda: bool(a.replica.state.in_flight))
        in_flight = sum(
            m.update.dense() for m in a.replica.running.own.in_flight(a.replica.state.log).values()
        )
        head = a.head
        a.replica.running.queue.lose("killed")
        a.replica.reset_weights()
        assert a.head is head
        await swarm.until(lambda: not a.replica.running.queue.lost)
        if a.head is head:
            assert np.allclose(a.unsent(), in_flight * QUANTUM, atol=4 * QUANTUM)
        await swarm.until(lambda: a.head.round > head.round)
        await swarm.until(lambda: np.abs(a.unsent()).max() < 16 * QUANTUM)

    run(work, tmp_path)


def test_a_saved_moment_resumes_without_counting_twice_or_undoing(tmp_path: Path) -> None:
    """Saved while an update is in flight; the swarm decides it while we are away."""

    async def work(swarm: Swarm) -> None:
        a, b, c = (swarm.add(name).start() for name in "abc")  # two of them outvote one
        await swarm.until(lambda: a.head.round >= 3 and same_head([a, b, c]))
        await swarm.until(lambda: bool(a.replica.state.in_flight))
        saved: list[tuple[Moment, Floats]] = []

        async def save(moment: Moment) -> None:
            saved.append((moment, a.toy.weights.copy()))

        await a.replica.at_rest(save)
        moment, weights = saved[0]
        assert moment.in_flight
        rest = unsent(weights, moment.consensus.weights)
        mine = next(iter(moment.in_flight))
        await swarm.until(lambda: b.replica.state.log.has_update(mine.digest))
        await a.stop()
        again = swarm.add("a")
        again.toy.weights, again.toy.learns = weights.copy(), False
        again.replica.restore(moment)
        again.start()
        await swarm.until(lambda: bool(again.moves))
        await asyncio.sleep(0.05)  # the correction is in the queue
        entry = next(e for e in again.replica.state.log.entries if mine.digest in e.named)
        scale = next(c.scale for c in entry.contributions if c.digest == mine.digest)
        settled = moment.in_flight[mine].update.dense() * scale / 65536
        left = np.rint(again.unsent() / QUANTUM)
        assert np.abs(left - (rest - settled)).max() < 64

    run(work, tmp_path)


def test_a_liar_among_four_changes_nothing_for_the_others(tmp_path: Path) -> None:
    """Every lie in a swarm of its own, all at the same time: rounds are mostly waiting."""

    async def work(swarm: Swarm) -> None:
        others = [Swarm(tmp_path / lie.value) for lie in Lie]
        try:
            await asyncio.gather(*(with_liar(s, lie) for s, lie in zip(others, Lie, strict=True)))
        finally:
            for other in others:
                for member in other.members.values():
                    await member.stop()

    run(work, tmp_path)


async def with_liar(swarm: Swarm, lie: Lie) -> None:
    swarm.folder.mkdir()
    honest = [swarm.add(name).start() for name in "abc"]
    bad = swarm.add("liar", liar(lie)).start()
    enough = 14 if lie in (Lie.SIGN_FLIP, Lie.NOISE, Lie.POISON) else 7
    await swarm.until(lambda: all(m.head.round >= enough for m in honest))
    await swarm.until(lambda: same_head(honest))
    me = bad.replica.me
    rows = [r for m in honest for r in m.reports]
    refused = [why for r in rows for peer, why in r.refused if peer == me]
    parts = [c for m in honest for e in m.entries if (c := e.contribution_of(me))]
    if lie in (Lie.SCALE, Lie.SIGN_FLIP, Lie.POISON):
        assert any(c.scale == 0 for c in parts), lie
    elif lie not in (Lie.NOISE, Lie.BIAS):  # of an ordinary norm: the rule's known limit
        assert refused, lie
        assert me in {peer for m in honest for peer in m.exclusions}, lie
        assert all(why for m in honest for why in m.reasons), lie
    if lie in (Lie.NAN, Lie.MALFORMED, Lie.OVERSIZED, Lie.COPY, Lie.OTHER_BLOCK):
        assert not parts, lie
    goal = np.random.default_rng(0).normal(size=SIZE)
    consensus = to_float(honest[0].replica.consensus.weights)
    assert np.linalg.norm(consensus - goal) < np.linalg.norm(goal), lie


def test_after_the_last_exchange_all_end_on_one_consensus_and_hand_it_out(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        swarm.last = 6
        first = [swarm.add(name).start() for name in "abc"]
        await swarm.until(lambda: first[0].replica.state.round >= 9)
        assert same_head(first) and first[0].head.round == 6
        assert all(m.reports[-1].round == 6 for m in first)  # nothing is said of later rounds
        late = swarm.add("late").start()
        await swarm.until(lambda: late.head == first[0].head)
        number = late.replica.state.round
        await swarm.until(lambda: late.replica.state.round >= number + 3)
        assert same_head([*first, late]) and not late.reports

    run(work, tmp_path)


def test_two_that_parted_in_the_last_exchange_end_on_one_consensus(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        swarm.last = 4
        a, b = swarm.add("a").start(), swarm.add("b").start()
        swarm.down = {a.replica.me, b.replica.me}
        await swarm.until(lambda: min(m.replica.state.round for m in (a, b)) >= 5)
        assert not same_head([a, b])
        swarm.down = set()
        await swarm.until(lambda: same_head([a, b]))

    run(work, tmp_path)


def test_the_canary_finds_a_poisoner_that_two_cannot_outvote(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        honest, bad = swarm.add("a"), swarm.add("liar", liar(Lie.POISON))
        honest.canary = CanaryWatch(honest.replica, honest.toy.evaluate, time_share=0.0)
        honest.start()
        bad.start()
        await swarm.until(lambda: bool(honest.exclusions))
        assert honest.exclusions == [bad.replica.me]
        assert "canary" in honest.reasons[0]
        worst = honest.losses_nats[-1]
        assert worst > honest.losses_nats[0]  # two-faced as it was, the rule let it in
        number = honest.head.round
        await swarm.until(lambda: honest.head.round >= number + 5)
        assert honest.head.contribution_of(bad.replica.me) is None
        assert honest.losses_nats[-1] < 0.95 * worst

    run(work, tmp_path)


def test_the_canary_accuses_nobody_of_what_all_do_and_rests_after_it(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        """Held-out text that is the opposite of what all of them learn."""
        a, b = swarm.add("a"), swarm.add("b")
        loop = asyncio.get_running_loop()
        began_s, measured = loop.time(), []

        async def evaluate(flat: Floats) -> float:
            await asyncio.sleep(0.05)
            measured.append(float(np.mean((flat + a.toy.goal) ** 2)))
            return measured[-1]

        canary = a.canary = CanaryWatch(a.replica, evaluate, time_share=4.0, clock=loop.time)
        a.start()
        b.start()
        await swarm.until(lambda: len(a.losses_nats) >= 20)
        assert a.losses_nats[-1] > a.losses_nats[0] + 0.5
        assert len(measured) > len(a.losses_nats)  # it looked into it,
        assert not a.exclusions  # and found that its own part does the same.
        assert len(canary.canary.recent) < 8  # Where it stands now is what it watches from then on.
        assert 0.05 * len(measured) <= (loop.time() - began_s) / 4.0 + 0.5

    run(work, tmp_path)


def test_another_peers_update_under_ones_own_name_is_refused(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        a, b = swarm.add("a"), swarm.add("b")
        heard: list[act.Event] = []
        a.replica.exchange.hear = heard.append
        payload, update = b.replica.encode(np.ones(SIZE, dtype=np.int64), b.replica.state.log, 1)
        ref = UpdateRef(content_digest(payload), b.replica.me)
        a.replica.exchange.keep(Held(ref, 1, payload, update))
        copied = UpdateRef(ref.digest, a.replica.me)
        until_s = swarm.now_s() + 1.0
        await a.replica.exchange.pull(act.Pull(copied, (b.replica.me,), until_s), 1)
        await a.replica.exchange.pull(act.Pull(ref, (b.replica.me,), until_s), 2)  # a replay
        await a.replica.exchange.pull(act.Pull(ref, (b.replica.me,), until_s), 1)
        reasons = [e.refused for e in heard if isinstance(e, act.UpdateArrived)]
        assert [bool(reason) for reason in reasons] == [True, True, False]

    run(work, tmp_path)


def test_diverged_weights_are_never_sent(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        a = swarm.add("a").start()
        await swarm.until(lambda: a.head.round >= 1)
        a.toy.weights = a.toy.weights * np.float32("nan")
        await swarm.until(lambda: any("diverged" in why for why in a.losses))
        number = len(a.entries)
        a.replica.reset_weights()
        await swarm.until(lambda: len(a.entries) > number)
        assert np.isfinite(to_float(a.replica.consensus.weights)).all()

    run(work, tmp_path)


def test_at_most_fifteen_others_are_heard_and_contributors_first(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        a = swarm.add("a")
        number = a.replica.state.round

        def record(name: str) -> act.PeerRecord:
            return act.PeerRecord(name, number, a.head.digest, a.head.round, None, 0, 0.2)

        assert all(a.replica._usable(record(f"p{i}")) for i in range(15))
        assert not a.replica._usable(record("stranger"))
        assert a.told_crowded == 1
        assert a.replica._usable(record("p3"))

    run(work, tmp_path)


def test_two_that_were_apart_agree_again(tmp_path: Path) -> None:
    """One against one, and both in time: the tie is broken, not kept for ever."""

    async def work(swarm: Swarm) -> None:
        a, b = swarm.add("a").start(), swarm.add("b").start()
        swarm.down = {a.replica.me, b.replica.me}
        await swarm.until(lambda: min(a.head.round, b.head.round) >= 5)
        assert not same_head([a, b])
        swarm.down = set()
        number = a.replica.state.round
        await swarm.until(lambda: same_head([a, b]) and a.head.round > number, 15.0)
        assert a.head.round <= number + 5

    run(work, tmp_path)


def test_over_its_budget_a_replica_is_quiet_and_comes_back_with_all_it_learned(
    tmp_path: Path,
) -> None:
    async def work(swarm: Swarm) -> None:
        a, b, c = (swarm.add(name).start() for name in "abc")
        await swarm.until(lambda: a.head.round >= 2 and len(a.head.contributions) == 3)
        number = a.replica.state.round
        a.replica.muted = True
        await swarm.until(lambda: b.head.round >= number + 4)
        assert same_head([b, c]) or b.head.round != c.head.round
        last = b.replica.state.log.entries[-2]
        assert {part.sender for part in last.contributions} == {b.replica.me, c.replica.me}
        a.replica.muted = False
        await swarm.until(lambda: same_head([a, b, c]) and len(a.head.contributions) == 3)

    run(work, tmp_path)


def test_over_its_budget_it_sends_who_catches_up_to_another_donor(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        a, b, c = (swarm.add(name).start() for name in "abc")
        await swarm.until(lambda: a.head.round >= 9 and same_head([a, b, c]))
        a.replica.muted = True
        log, snapshot = a.replica.state.log, next(iter(a.replica.consensus.snapshots.values()))
        purpose = messages.Purpose.CATCH_UP
        questions: list[Message] = [
            messages.LogRequest(run=RUN, block=0, since=bytes(32), purpose=purpose),
            messages.IndexRequest(run=RUN, block=0, digest=snapshot.pin.name, purpose=purpose),
            messages.ShardRequest(
                run=RUN, block=0, digest=snapshot.pin.name, shard=0, purpose=purpose
            ),
            messages.AggregateRequest(
                run=RUN, block=0, round=10, digest=log.head.digest, purpose=purpose
            ),
            messages.UpdateRequest(run=RUN, block=0, round=9, digest=bytes(32), purpose=purpose),
        ]
        for question in questions:
            with pytest.raises(Refused, match="over its budget") as error:
                await a.handlers[type(question)](question, b"")
            assert error.value.code == messages.ErrorCode.NOT_ALLOWED
        late = swarm.add("late").start()
        await swarm.until(lambda: late.moves and same_head([b, c, late]))
        assert a.replica.me not in late.exclusions  # it told no lie

    run(work, tmp_path)


def test_a_vote_that_is_not_of_this_block_is_refused(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        a = swarm.add("a")
        for data in (b"", b"\x00" * 200):
            with pytest.raises(WireError):
                a.replica.hear_vote(data)

    run(work, tmp_path)
