"""A replica among strangers: liars of every kind, other peers' updates, votes, too many of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from node.replica.exchange import HeldUpdate
from node.simulator.liar import Lie, liar
from protocol.errors import WireError
from protocol.frames import content_digest
from protocol.votes import UpdateRef
from swarm.consensus.feedback import Unsent
from swarm.consensus.fixed_point import to_float
from swarm.rounds import actions as act
from tests.support.replica_swarm import SIZE, Swarm, run, same_head


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


# Of an ordinary norm, which is the rule's limit; and one that shows nothing to refuse.
WELL_FORMED = (Lie.NOISE, Lie.BIAS, Lie.STALL, Lie.STALE, Lie.TWO_FACED, Lie.SILENT)


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
    elif lie not in WELL_FORMED:
        assert refused, lie
        assert me in {peer for m in honest for peer in m.exclusions}, lie
        assert all(why for m in honest for why in m.reasons), lie
    if lie in (Lie.NAN, Lie.MALFORMED, Lie.OVERSIZED, Lie.COPY, Lie.OTHER_BLOCK):
        assert not parts, lie
    goal = np.random.default_rng(0).normal(size=SIZE)
    consensus = to_float(honest[0].replica.consensus.weights)
    assert np.linalg.norm(consensus - goal) < np.linalg.norm(goal), lie


def test_another_peers_update_under_ones_own_name_is_refused(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        a, b = swarm.add("a"), swarm.add("b")
        heard: list[act.Event] = []
        a.replica.exchange.hear = heard.append
        ones = Unsent(np.ones(SIZE, dtype=np.float32), np.zeros(SIZE, dtype=np.int32))
        payload, update = b.replica.encode(ones, b.replica.state.log, 1)
        ref = UpdateRef(content_digest(payload), b.replica.me)
        a.replica.exchange.keep(HeldUpdate(ref, 1, payload, update))
        copied = UpdateRef(ref.digest, a.replica.me)
        until_s = swarm.now_s() + 1.0
        await a.replica.exchange.pull(act.Pull(copied, (b.replica.me,), until_s), 1)
        await a.replica.exchange.pull(act.Pull(ref, (b.replica.me,), until_s), 2)  # a replay
        await a.replica.exchange.pull(act.Pull(ref, (b.replica.me,), until_s), 1)
        reasons = [e.refused for e in heard if isinstance(e, act.UpdateArrived)]
        assert [bool(reason) for reason in reasons] == [True, True, False]

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


def test_a_vote_that_is_not_of_this_block_is_refused(tmp_path: Path) -> None:
    async def work(swarm: Swarm) -> None:
        a = swarm.add("a")
        for data in (b"", b"\x00" * 200):
            with pytest.raises(WireError):
                await a.replica.hear_vote(data, b"")

    run(work, tmp_path)
