"""What free identities can do to a replica by talking: nothing that lasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from protocol.log import Contribution, Entry
from protocol.votes import UpdateRef, Vote
from swarm.consensus.log import ConsensusLog
from swarm.rounds import actions as act
from swarm.rounds.heads import IN_FLIGHT
from swarm.rounds.round import step
from swarm.rounds.state import MAX_EARLY, RoundState
from tests.support.one_replica import RULES, START, fresh, own

NOW = 60
PERIOD_S = RULES.period_s
HONEST = ("h1", "h2", "h3")


def history(members: Sequence[str], rounds: int) -> ConsensusLog:
    log = ConsensusLog((START,))
    for number in range(rounds):
        parts = tuple(
            Contribution(bytes([i + 1]) * 28 + number.to_bytes(4, "big"), member, 65536)
            for i, member in enumerate(members)
        )
        log = log.appended(Entry(number, log.head.digest, bytes(32), bytes(32), 100, parts))
    return log


def made_up(log: ConsensusLog, number: int) -> Entry:
    """A head that nobody decided, with a digest below the real one: ties would go to it."""
    for salt in range(10_000):
        parts = (Contribution(b"e" * 32, "s0", 65536),)
        step_name = salt.to_bytes(32, "big")
        entry = Entry(number, log.entries[-2].digest, bytes(32), step_name, 100, parts)
        if entry.digest < log.head.digest:
            return entry
    raise AssertionError("no such digest")


def says(peer: str, number: int, head: Entry) -> act.PeerRecord:
    return act.PeerRecord(peer, number, head.digest, head.round, None, 0, 6.0)


@pytest.mark.parametrize(
    ("honest", "strangers", "rounds_seen", "decided", "last"),
    [
        pytest.param(HONEST, 1, 0, 21, 20, id="after the end of the run"),
        pytest.param(HONEST, 1, 0, NOW - 3, None, id="nothing was decided for some rounds"),
        pytest.param(HONEST, 5, 4, NOW, None, id="more strangers than contributors"),
        pytest.param(HONEST, 4, 4, NOW, None, id="as many"),
        pytest.param((), 1, 4, NOW, None, id="one against one who is alone"),
    ],
)
def test_strangers_do_not_choose_the_head(
    honest: tuple[str, ...], strangers: int, rounds_seen: int, decided: int, last: int | None
) -> None:
    log = history(["me", *honest], decided)
    state = RoundState("me", replace(RULES, last=last), log, round=NOW - rounds_seen - 1)
    for number in range(NOW - 10, NOW - rounds_seen):
        state = replace(state, trust=state.trust.seen(honest, number))
    lie = made_up(log, NOW - 1)
    for number in range(NOW - rounds_seen, NOW + 1):
        at_s = number * PERIOD_S
        claim = lie if number == NOW else log.head
        heard = [says(peer, number, log.head) for peer in honest]
        heard += [says(f"s{i}", number, claim) for i in range(strangers)]
        for event in (act.Tick(), *heard):
            state, actions = step(state, event, at_s + 0.1)
            assert not any(isinstance(action, act.FetchConsensus) for action in actions)
        state, actions = step(state, act.Tick(), at_s + RULES.deadline.ceiling_s + 0.5)
        assert not any(isinstance(action, act.FetchConsensus) for action in actions)


def test_who_slept_while_all_it_knew_were_replaced_moves_to_the_others() -> None:
    ours, theirs = history(["me", "gone"], 20), history(["new1", "new2"], NOW)
    state = RoundState("me", RULES, ours, round=NOW - 1)
    state, _ = step(state, act.Tick(), NOW * PERIOD_S + 0.1)
    wanted: list[act.FetchConsensus] = []
    for peer in ("new1", "new2"):
        state, actions = step(state, says(peer, NOW, theirs.head), NOW * PERIOD_S + 0.2)
        wanted += [action for action in actions if isinstance(action, act.FetchConsensus)]
    assert [action.target for action in wanted] == [theirs.head.digest]
    state, _ = step(state, act.ConsensusFetched(theirs.head.digest, theirs.entries), NOW * PERIOD_S)
    assert state.log.head == theirs.head


def test_a_chain_of_rounds_that_were_not_decided_yet_is_refused() -> None:
    """Its owner signs a round that is possible; the entry behind the digest says another."""
    ours = history(["me", "gone"], 20)
    state, _ = step(RoundState("me", RULES, ours, round=NOW - 1), act.Tick(), NOW * PERIOD_S + 0.1)
    future = Entry(NOW + 500, ours.head.digest, bytes(32), bytes(32), 100, ())
    record = replace(says("liar", NOW, future), head_round=NOW - 1)
    after_s = NOW * PERIOD_S + RULES.deadline.ceiling_s
    state, actions = step(state, record, after_s + 0.2)
    assert any(isinstance(action, act.FetchConsensus) for action in actions)
    fetched = act.ConsensusFetched(future.digest, (*ours.entries, future))
    state, actions = step(state, fetched, after_s + 0.3)
    assert state.log.head == ours.head and actions == []


def test_one_who_talks_much_does_not_keep_the_others_from_being_heard_early() -> None:
    state, _ = step(fresh(), act.Tick(), 0.1)
    next_round = state.round + 1
    for sequence in range(1000):
        chatter = act.PeerRecord("loud", next_round, START.digest, -1, None, 0, sequence / 1000)
        state, _ = step(state, chatter, 0.2)
    update = UpdateRef(b"u" * 32, "quiet")
    for offered in (None, update):  # of one peer the newest counts
        record = act.PeerRecord("quiet", next_round, START.digest, -1, offered, 9, 2.0)
        state, _ = step(state, record, 0.3)
    state, _ = step(state, act.Tick(), PERIOD_S + 0.1)
    assert {"loud", "quiet"} <= state.peers.keys()
    assert state.stage is not None and update in state.stage.offers


def test_two_votes_that_both_come_early_void_each_other_as_they_do_later() -> None:
    state, _ = step(fresh(), act.Tick(), 0.1)
    head, number = state.log.head, state.round + 1
    liar, honest = (
        [Vote(voter, number, head.digest, head.round, (UpdateRef(n * 32, "q"),)) for n in digests]
        for voter, digests in (("liar", (b"a", b"b", b"c", b"a")), ("honest", (b"a", b"a")))
    )
    for vote in (*liar, *honest):
        state, _ = step(state, act.VoteArrived(vote), 0.2)
    assert len(state.early) == 3  # no more than prove it
    state, _ = step(state, act.Tick(), number * PERIOD_S + 0.1)
    assert state.stage is not None
    assert state.stage.ballot.votes.keys() == {"honest"}
    assert state.stage.ballot.two_faced == {"liar"}
    assert state.trust.of("liar").faults == (number,) and not state.trust.of("honest").faults


def test_early_votes_are_bounded_whoever_sends_them() -> None:
    state, _ = step(fresh(), act.Tick(), 0.1)
    head, number = state.log.head, state.round + 1
    for voter in range(MAX_EARLY):
        for listed in (b"a", b"b"):
            refs = (UpdateRef(listed * 32, "q"),)
            vote = Vote(f"s{voter}", number, head.digest, head.round, refs)
            state, _ = step(state, act.VoteArrived(vote), 0.2)
    assert len(state.early) == MAX_EARLY


def test_updates_of_rounds_that_nobody_decides_are_unsent_again() -> None:
    """A voter who agrees to nothing, while the run is so young that everybody has a vote."""
    state, returned = fresh(), 0
    for number in range(40):
        at_s = number * PERIOD_S
        head = state.log.head
        for event, after_s in (
            (act.Tick(), 0.1),
            (act.UpdateReady(number, own(number + 1), 10), 0.2),
            (act.PeerRecord("liar", number, head.digest, head.round, None, 0, 1.0), 0.3),
            (act.VoteArrived(Vote("liar", number, head.digest, head.round, ())), 0.4),
            (act.Tick(), RULES.deadline.ceiling_s + 1),
            (act.Tick(), RULES.deadline.ceiling_s + 4),
        ):
            state, actions = step(state, event, at_s + after_s)
            returned += sum(isinstance(action, act.ReturnToFeedback) for action in actions)
    assert state.log.head == START
    assert len(state.in_flight) <= IN_FLIGHT + 1
    assert returned >= 30
