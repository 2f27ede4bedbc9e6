"""Who is new to a block: whom it follows, when it waits, and when it decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.log import Contribution, Entry
from protocol.votes import Vote
from swarm.consensus.fixed_point import SCALE_ONE
from swarm.consensus.log import ConsensusLog
from swarm.rounds import actions as act
from swarm.rounds.round import step
from swarm.rounds.state import Phase, RoundState
from tests.support.one_replica import RULES, START, own, theirs


def stood_elsewhere(mine: tuple[Entry, ...], theirs: Entry) -> list[act.Action]:
    """What a replica does when the only other one says, before the deadline, that it is ahead."""
    state = RoundState("me", RULES, ConsensusLog((START, *mine)), round=1)
    state, _ = step(state, act.Tick(), 40.1)
    assert state.stage is not None and state.stage.phase is Phase.COLLECT
    record = act.PeerRecord("p0", 2, theirs.digest, theirs.round, None, 0, 2.0)
    return step(state, record, 40.2)[1]


@pytest.mark.parametrize("salt", range(4))  # of two heads the lower digest wins a tie
def test_a_newcomer_follows_one_that_is_ahead_at_once(salt: int) -> None:
    part = Contribution(bytes([salt]) * 32, "p0", SCALE_ONE)
    first = Entry(0, START.digest, bytes(32), bytes(32), 1, (part,))
    second = Entry(1, first.digest, bytes(32), bytes(32), 1, (part,))
    found = [a for a in stood_elsewhere((first,), second) if isinstance(a, act.FetchConsensus)]
    assert [(a.target, a.holders) for a in found] == [(second.digest, ("p0",))]


@pytest.mark.parametrize("salt", range(4))
def test_who_has_contributed_is_a_side_of_a_tie_until_the_deadline(salt: int) -> None:
    part = Contribution(bytes([salt]) * 32, "me", SCALE_ONE)
    first = Entry(0, START.digest, bytes(32), bytes(32), 1, (part,))
    other = Entry(1, START.digest, bytes(32), bytes(32), 1, ())
    actions = stood_elsewhere((first,), other)
    assert not any(isinstance(a, act.FetchConsensus) for a in actions)


def joined(number: int, warm_until: int) -> RoundState:
    """On the consensus of p0, who made all of it, at the opening of a round."""
    log = ConsensusLog((START,))
    for before in range(number):
        part = Contribution(theirs(0, before).digest, "p0", SCALE_ONE)
        log = log.appended(Entry(before, log.head.digest, bytes(32), bytes(32), 1, (part,)))
    return RoundState("me", RULES, log, warm_until=warm_until, round=number - 1)


@pytest.mark.parametrize(("rounds_here", "decides"), [(1, False), (2, False), (3, True)])
def test_a_newcomer_that_hears_no_vote_leaves_the_round_to_those_who_have_one(
    rounds_here: int, decides: bool
) -> None:
    state = joined(4, 4 - rounds_here)
    record = act.PeerRecord("p0", 4, state.log.head.digest, 3, None, 0, 2.0)
    state, _ = step(state, record, 80.1)
    state, _ = step(state, act.UpdateReady(4, own(4), 10), 80.2)
    asked = []
    for now_s in (86.1, 87.0, 87.7, 89.2):  # past all deadlines
        state, actions = step(state, act.Tick(), now_s)
        asked += [a for a in actions if isinstance(a, act.ComputeStep)]
    assert bool(asked) == decides
    assert (state.outcome == "syncing") != decides


@pytest.mark.parametrize("who", ["nobody", "another newcomer"])
def test_a_newcomer_decides_if_it_is_alone_or_with_others_who_are_there(who: str) -> None:
    state = joined(4, 3)
    if who != "nobody":  # p0 was there a moment ago and is gone; p1 has come like us
        for peer in ("p0", "p1"):
            record = act.PeerRecord(peer, 4, state.log.head.digest, 3, None, 0, 2.0)
            state, _ = step(state, record, 80.1)
        vote = Vote("p1", 4, state.log.head.digest, 3, (own(4),))
        state, _ = step(state, act.VoteArrived(vote), 80.1)
    state, _ = step(state, act.UpdateReady(4, own(4), 10), 80.2)
    asked = []
    for now_s in (86.1, 87.0, 87.7, 89.2):
        state, actions = step(state, act.Tick(), now_s)
        asked += [a for a in actions if isinstance(a, act.ComputeStep)]
    assert asked


def test_an_update_of_a_round_whose_result_we_have_is_no_replay() -> None:
    """A newcomer begins with the result of the round that its neighbours are still in."""
    state = replace(joined(4, 3), round=2)
    state, _ = step(state, act.Tick(), 60.1)
    assert state.round == state.log.head.round == 3
    record = act.PeerRecord("p0", 3, state.log.head.parent, 2, theirs(0, 3), 10, 2.0)
    state, _ = step(state, record, 60.2)
    assert state.stage is not None and not state.stage.refused
    assert not state.trust.of("p0").faults
    # One of an earlier round is one.
    record = act.PeerRecord("p0", 4, state.log.head.digest, 3, theirs(0, 3), 10, 2.0)
    state, _ = step(state, act.Tick(), 80.1)
    state, _ = step(state, record, 80.2)
    assert state.trust.of("p0").faults


def test_a_newcomer_that_has_heard_of_nobody_waits_for_its_deadline() -> None:
    """Its slow first step cost it the round before; those who made its log are about to answer."""
    state = joined(4, 2)
    state, _ = step(state, act.Tick(), 80.05)
    state, actions = step(state, act.UpdateReady(4, own(4), 10), 80.1)
    assert not any(isinstance(a, act.SendVote | act.ComputeStep) for a in actions)
    ahead = Entry(3, state.log.head.parent, bytes(32), b"w" * 32, 1, ())
    record = act.PeerRecord("p0", 4, ahead.digest, 3, theirs(0, 4), 10, 2.0)
    state, actions = step(state, record, 80.4)
    assert not any(isinstance(a, act.ComputeStep) for a in actions)


def test_a_record_of_the_round_before_says_that_its_owner_is_there() -> None:
    state = joined(4, 3)
    state, _ = step(state, act.Tick(), 80.05)
    record = act.PeerRecord("p0", 3, state.log.head.parent, 2, theirs(0, 3), 10, 2.0)
    state, actions = step(state, record, 80.1)
    assert state.peers["p0"].round == 3
    assert not any(isinstance(a, act.Pull) for a in actions)
    older = act.PeerRecord("p1", 2, state.log.head.parent, 1, None, 0, 2.0)
    state, _ = step(state, older, 80.2)
    assert "p1" not in state.peers
