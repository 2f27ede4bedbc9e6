"""The canary on live replicas: it finds who spoils the consensus, and accuses nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from node.replica.canary import CanaryWatch
from node.simulator.liar import Lie, liar
from protocol.identity import new_identity, peer_text
from swarm.learning.flat import Floats
from swarm.rounds import actions as act
from tests.support.replica_swarm import Swarm, run


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


def test_the_canary_finds_who_undoes_what_the_other_learns(tmp_path: Path) -> None:
    """No jump: the loss only does not fall. An audit finds whose part keeps it up."""

    async def work(swarm: Swarm) -> None:
        honest, bad = swarm.add("a"), swarm.add("liar", liar(Lie.STALL))
        honest.canary = CanaryWatch(honest.replica, honest.toy.evaluate, time_share=0.0)
        honest.start()
        bad.start()
        await swarm.until(lambda: bool(honest.exclusions))
        assert honest.exclusions == [bad.replica.me]
        assert "canary" in honest.reasons[0]
        stalled = honest.losses_nats[-1]
        assert max(honest.losses_nats) < honest.losses_nats[0] + 0.05
        number = honest.head.round
        await swarm.until(lambda: honest.head.round >= number + 8)
        assert honest.losses_nats[-1] < 0.8 * stalled

    run(work, tmp_path)


def test_the_canary_audits_honest_replicas_in_vain(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        members = [swarm.add(name) for name in "abc"]
        for member in members:
            member.canary = CanaryWatch(member.replica, member.toy.evaluate, time_share=0.0)
            member.start()
        await swarm.until(lambda: min(len(m.losses_nats) for m in members) >= 20)
        assert max(m.toy.evaluations - len(m.losses_nats) for m in members) >= 4  # it did
        assert not any(m.exclusions for m in members)

    run(work, tmp_path)


def test_the_canary_accuses_nobody_of_what_all_do_and_rests_after_it(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        """Held-out text that is the opposite of what all of them learn."""
        a, b = swarm.add("a"), swarm.add("b")
        loop = asyncio.get_running_loop()
        began_s, measured = loop.time(), []

        async def evaluate(flat: Floats) -> float:
            await asyncio.sleep(0.05)  # of virtual time: what a measurement takes
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


def test_the_canary_blames_nobody_here_for_what_other_blocks_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this block reads turns bad: with it, what the others learn looks like harm."""

    async def work(swarm: Swarm) -> None:
        a, b = swarm.add("a"), swarm.add("b")
        spoiled = asyncio.Event()

        async def evaluate(flat: Floats) -> float:
            loss = float(np.mean((flat - a.toy.goal) ** 2))
            return 20.0 - 10.0 * loss if spoiled.is_set() else loss

        watch = a.canary = CanaryWatch(a.replica, evaluate, time_share=0.0)
        # A newcomer's own part is no control: it has sent next to nothing. As here a stranger's.
        suspects = [b.replica.me, peer_text(new_identity().peer_id)]
        monkeypatch.setattr(watch, "_suspects", lambda entries: suspects)
        a.start()
        b.start()
        await swarm.until(lambda: len(a.losses_nats) >= 4)
        spoiled.set()
        await swarm.until(lambda: a.losses_nats[-1] > 5.0)
        assert len(watch.canary.recent) == 1  # it was an alarm, and looked into
        assert not a.replica.state.trust.excluded(b.replica.me, a.replica.state.round + 1)

    run(work, tmp_path)


def test_where_texts_may_differ_it_measures_and_blames_nobody(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        honest, bad = swarm.add("a"), swarm.add("liar", liar(Lie.POISON))
        toy = honest.toy
        honest.canary = CanaryWatch(honest.replica, toy.evaluate, time_share=0.0, judges=False)
        honest.start()
        bad.start()
        await swarm.until(lambda: len(honest.losses_nats) > 20)
        assert max(honest.losses_nats) > honest.losses_nats[0]  # a judge would have seen it
        assert not honest.exclusions

    run(work, tmp_path)


def test_who_is_left_out_hears_the_reason_that_the_others_had(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        a, b, c = (swarm.add(name).start() for name in "abc")
        await swarm.until(lambda: min(m.head.round for m in (a, b, c)) >= 3)
        assert not any(report.declined for m in (a, b, c) for report in m.reports)
        for member in (a, b):
            number = member.replica.state.round
            member.replica.hear(act.CanaryVerdict(number, (c.replica.me,)))
        await swarm.until(lambda: any(len(report.declined) == 2 for report in c.reports))
        report = next(r for r in c.reports if len(r.declined) == 2)
        assert report.included is False and c.replica.me not in report.agreed
        assert dict(report.declined) == {
            m.replica.me: "it made their held-out text worse" for m in (a, b)
        }
        assert not any(r.declined for m in (a, b) for r in m.reports)

    run(work, tmp_path)
