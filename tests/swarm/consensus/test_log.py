"""The consensus log: names, catch-up plans, branches, what it knows of senders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.log import Contribution, Entry, LogError, genesis
from swarm.consensus.fixed_point import SCALE_ONE
from swarm.consensus.log import ConsensusLog, check_chain


def grown(log: ConsensusLog, rounds: range, mark: str = "", *senders: str) -> ConsensusLog:
    for number in rounds:
        parts = tuple(
            Contribution(f"{mark}{number}{s}".encode().ljust(32), s, SCALE_ONE, 100)
            for s in senders or ("a", "b")
        )
        weights = f"{mark}{number}".encode().ljust(32)
        entry = Entry(number, log.head.digest, weights, weights, 1000 + number, parts)
        log = log.appended(entry)
    return log


START = ConsensusLog((genesis("run", 0, bytes(32)),), snapshot_every=4)


def test_chain_is_checked() -> None:
    log = grown(START, range(1, 8))
    check_chain(log.entries, log.head.digest)
    for entries, head in (
        ((), log.head.digest),
        (log.entries[:-1], log.head.digest),
        (log.entries[:3] + log.entries[4:], log.head.digest),
        (log.entries[::-1], log.entries[0].digest),
        ((*log.entries[:-1], replace(log.head, median_norm=1)), log.head.digest),
    ):
        with pytest.raises(LogError):
            check_chain(entries, head)
    with pytest.raises(LogError):
        START.appended(log.head)


def test_digest_covers_everything() -> None:
    entry = grown(START, range(1, 2)).head
    part = entry.contributions[0]
    changes = [
        replace(entry, round=2),
        replace(entry, parent=b"x" * 32),
        replace(entry, weights=b"x" * 32),
        replace(entry, step=b"x" * 32),
        replace(entry, median_norm=3),
        replace(entry, contributions=entry.contributions[:1]),
        replace(entry, contributions=(replace(part, score=1), *entry.contributions[1:])),
        replace(entry, contributions=(replace(part, scale=1), *entry.contributions[1:])),
        replace(entry, contributions=(replace(part, sender="z"), *entry.contributions[1:])),
    ]
    assert len({e.digest for e in [entry, *changes]}) == len(changes) + 1


def test_two_snapshots_are_pinned_and_steps_kept_since_the_older() -> None:
    log = grown(START, range(1, 14))
    assert [e.round for e in log.pinned()] == [8, 12]
    assert [e.round for e in log.steps_kept()] == [9, 10, 11, 12, 13]
    assert [e.round for e in START.pinned()] == [-1]


def test_following_costs_only_the_steps() -> None:
    log = grown(START, range(1, 14))
    behind = ConsensusLog(log.entries[:-2], 4)
    plan = behind.plan_move(log.since(behind.head.digest), log.pinned())
    assert plan.snapshot is None
    assert not plan.rollback
    assert [e.round for e in plan.forward] == [12, 13]


def test_a_newcomer_takes_the_newest_snapshot() -> None:
    log = grown(START, range(1, 15))
    plan = START.plan_move(log.since(START.head.digest), log.pinned())
    assert plan.snapshot is not None
    assert plan.snapshot.round == 12
    assert [e.round for e in plan.forward] == [13, 14]
    assert START.moved(log.since(START.head.digest)).head == log.head


def test_a_branch_is_rolled_back() -> None:
    common = grown(START, range(1, 10))
    ours, theirs = grown(common, range(10, 12), "o"), grown(common, range(10, 13), "t")
    for chain in (theirs.entries, theirs.entries[-3:]):  # the fork may sit right before the chain
        plan = ours.plan_move(chain, theirs.pinned())
        assert plan.known
        assert [e.round for e in plan.rollback] == [11, 10]
        assert [e.digest for e in plan.forward] == [e.digest for e in theirs.entries[-3:]]
        assert ours.moved(chain) == theirs


def test_no_common_ancestor() -> None:
    theirs = grown(START, range(1, 10), "t")
    cut = ConsensusLog(theirs.entries[-4:], 4)
    ours = grown(START, range(1, 3), "o")
    plan = ours.plan_move(cut.entries, cut.pinned())
    assert not plan.known
    assert plan.snapshot is not None
    assert ours.moved(cut.entries).entries == cut.entries


def test_pruning() -> None:
    log = grown(ConsensusLog(START.entries, 4, keep_entries=6), range(1, 20))
    assert [e.round for e in log.entries] == list(range(14, 20))


def test_what_all_replicas_know_alike() -> None:
    assert START.eligible_voters() == frozenset()
    young = grown(START, range(1, 2))
    assert young.eligible_voters() == {"a", "b"}
    log = grown(grown(START, range(1, 9)), range(9, 11), "", "a", "new")
    assert log.eligible_voters() == {"a", "b"}  # "new" was included twice, three are needed
    assert log.recent_norms(2) == (1009, 1010)
    assert log.past_scores("new") == (100, 100)
    assert log.has_update(log.head.contributions[0].digest)
    assert not log.has_update(b"other")
