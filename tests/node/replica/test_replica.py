"""What a live replica adds to the pure round: the ledger of its weights over crashes, silence."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from node.replica.running_weights import Moment
from node.trainer.trainer import TrainerError
from protocol import messages
from protocol.frames import Refused
from protocol.messages import Message
from swarm.consensus.fixed_point import to_float
from swarm.learning.flat import Floats
from tests.support.fixed_updates import unsent
from tests.support.replica_swarm import QUANTUM, RUN, SIZE, Swarm, run, same_head


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


def test_a_newcomer_is_known_at_once_not_only_with_its_first_update(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        host = swarm.add("a").start()
        await swarm.until(lambda: host.head.round >= 2)
        number = host.replica.state.round
        late = swarm.add("late").start()
        await swarm.until(lambda: late.replica.me in host.replica.state.peers)
        assert host.replica.state.round == number and late.replica.state.own is None

    run(work, tmp_path)


def test_older_versions_can_be_had_as_long_as_the_log_reaches(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        a, b = swarm.add("a").start(), swarm.add("b").start()
        seen: dict[int, Floats] = {}
        while len(seen) < 12:
            number = a.head.round
            await swarm.until(lambda number=number: a.head.round > number and same_head([a, b]))
            seen[a.head.round] = to_float(a.replica.consensus.weights)
        for number, weights in list(seen.items())[-4:]:
            found = a.replica.weights_at(number)
            assert found is not None and np.array_equal(to_float(found), weights)
        assert a.replica.weights_at(max(seen) + 5) is None
        assert a.replica.weights_at(min(seen)) is None  # its steps are gone

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


def test_a_trainer_that_dies_during_a_save_is_lost_and_nothing_counts_twice(tmp_path: Path) -> None:
    """What was aside is in the weights for the save: nobody may go on from them as they are."""

    async def work(swarm: Swarm) -> None:
        a, b = swarm.add("a").start(), swarm.add("b").start()
        await swarm.until(lambda: a.head.round >= 3 and a.replica.running.aside is not None)

        async def save(moment: Moment) -> None:
            a.toy.alive = a.toy.learns = False

        with pytest.raises(TrainerError):
            await a.replica.at_rest(save)
        assert a.replica.running.queue.lost and a.losses
        a.toy.alive = True
        a.replica.reset_weights()
        await swarm.until(lambda: not a.replica.running.queue.lost)
        number = a.head.round
        await swarm.until(lambda: a.head.round >= number + 3 and not a.replica.state.in_flight)
        # It learns no more, so all that is unsent would be what was counted twice.
        await swarm.until(lambda: bool(np.abs(a.unsent()).max() < 64 * QUANTUM))
        assert b.head.round >= number

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
            messages.IndexRequest(run=RUN, block=0, digest=snapshot.pin.snapshot, purpose=purpose),
            messages.ShardRequest(
                run=RUN, block=0, digest=snapshot.pin.snapshot, shard=0, purpose=purpose
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


def test_nothing_grows_from_round_to_round(tmp_path: Path) -> None:
    """After its first rounds a replica has as many objects of ours as it will ever have. The log,
    which keeps 1024 entries, is cut to 16 here so that it has its full length."""

    async def work(swarm: Swarm) -> None:
        members = [swarm.add(name).start() for name in "abc"]

        async def look() -> Counter[str]:
            number = members[0].head.round
            await swarm.until(
                lambda: members[0].head.round >= number + 16 and same_head(members), 60.0
            )
            for member in members:
                member.reports.clear()
                member.entries.clear()
                member.tasks[2:] = []
            gc.collect()
            found = Counter(type(thing) for thing in gc.get_objects())
            ours = Counter({"tasks": len(asyncio.all_tasks())})
            for kind, count in found.items():
                if str(kind.__module__).split(".")[0] in ("node", "swarm", "protocol"):
                    ours[f"{kind.__module__}.{kind.__qualname__}"] = count
            return ours

        await swarm.until(lambda: members[0].head.round >= 4)
        for member in members:
            state = member.replica.state
            member.replica.state = replace(state, log=replace(state.log, keep_entries=16))
        await look()
        await look()
        early = await look()
        for _ in range(3):
            late = await look()
        grown = {kind: late[kind] - early[kind] for kind in late if late[kind] > early[kind]}
        # Where in its round each one is looked at differs by some objects, not by some a round.
        assert all(more <= 16 for more in grown.values()), grown
        assert late["swarm.consensus.log.Entry"] <= 3 * (16 + 8)

    run(work, tmp_path)
