"""The round against any order, loss and repetition of events: one machine, fed at random.

Whole swarms, with every action watched: `tests/node/simulator`.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.log import Contribution, Entry
from protocol.votes import Vote
from swarm.consensus.fixed_point import SCALE_ONE
from swarm.consensus.log import ConsensusLog
from swarm.rounds import actions as act
from swarm.rounds.deadline import DeadlineRules
from swarm.rounds.round import next_wakeup_s, step
from swarm.rounds.state import RoundRules, RoundState
from tests.support.bookkeeping import Books, check_time
from tests.support.one_replica import RULES, START, fresh, own, theirs


@given(now_s=st.floats(-100.0, -0.1))
def test_nothing_is_exchanged_before_the_run_begins(now_s: float) -> None:
    """Whoever comes early, or has a clock that is behind, waits for round 0."""
    state, actions = step(
        RoundState("me", RULES, ConsensusLog((START,)), round=-9), act.Tick(), now_s
    )
    assert actions == [] and state.stage is None and state.round < 0
    assert now_s < next_wakeup_s(state, now_s) <= now_s + RULES.period_s
    state, actions = step(state, act.Tick(), 0.5)
    assert state.round == 0 and actions


def test_a_host_that_followed_a_wrong_clock_alone_is_back_in_the_rounds_of_the_others() -> None:
    """It was an hour ahead of them, and decided some rounds there that never were."""

    def history(members: tuple[str, ...], rounds: range) -> ConsensusLog:
        log = ConsensusLog((START,))
        for number in rounds:
            parts = tuple(
                Contribution(bytes([i + 1]) * 28 + number.to_bytes(4, "big"), member, SCALE_ONE)
                for i, member in enumerate(members)
            )
            log = log.appended(Entry(number, log.head.digest, bytes(32), bytes(32), 1, parts))
        return log

    period_s = RULES.period_s
    ours, theirs_log = history(("me", "p0"), range(30, 203)), history(("me", "p0", "p1"), range(25))
    state = RoundState("me", RULES, ours, round=203, in_flight={own(9): 203}, warm_until=203)
    state, actions = step(state, act.Tick(), 203 * period_s - 200.0)  # a correction: waited out
    assert state.round == 203 and actions == []
    state, actions = step(state, act.Tick(), 25 * period_s + 0.1)
    assert state.round == 25 and not state.in_flight
    assert act.ReturnToFeedback(own(9)) in actions
    head = theirs_log.head
    record = act.PeerRecord("p0", 25, head.digest, head.round, None, 0, 6.0)
    state, _ = step(state, record, 25 * period_s + 0.2)
    after_s = 25 * period_s + RULES.deadline.ceiling_s + 0.5
    _, actions = step(state, act.Tick(), after_s)
    assert [a.target for a in actions if isinstance(a, act.FetchConsensus)] == [head.digest]
    _, actions = step(state, act.Tick(), 26 * period_s + 0.1)
    assert any(isinstance(action, act.MakeUpdate) for action in actions)


peers = st.integers(0, 3)
rounds = st.integers(0, 4)
heads = st.sampled_from([START.digest, b"x" * 32, b"y" * 32])
events = st.one_of(
    st.just(act.Tick()),
    st.builds(lambda r: act.UpdateReady(r, own(r), 10), rounds),
    st.builds(
        lambda p, r, h, u: act.PeerRecord(
            f"p{p}", r, h, r - 1, theirs(p, r) if u else None, 10, 2.0
        ),
        peers,
        rounds,
        heads,
        st.booleans(),
    ),
    st.builds(
        lambda p, r, bad: act.UpdateArrived(theirs(p, r), bad),
        peers,
        rounds,
        st.sampled_from(["", "", "size"]),
    ),
    st.builds(lambda p, r: act.PullFailed(theirs(p, r)), peers, rounds),
    st.builds(
        lambda p, r, h, listed, mine: act.VoteArrived(
            Vote(
                f"p{p}",
                r,
                h,
                r - 1,
                tuple(sorted([theirs(q, r) for q in listed] + ([own(r)] if mine else []))),
            )
        ),
        peers,
        rounds,
        heads,
        st.sets(peers),
        st.booleans(),
    ),
    st.builds(lambda h: act.FetchFailed(h, ("p1",)), heads),
    st.builds(lambda r: act.CanaryVerdict(r, ("p2",)), rounds),
    st.just("aggregated"),
    st.just("fetched"),
)


def entry_for(state: RoundState, asked: act.ComputeStep) -> Entry:
    parts = tuple(Contribution(r.digest, r.sender, SCALE_ONE) for r in asked.refs)
    return Entry(asked.round, asked.base, bytes(32), bytes(32), 1, parts)


@given(st.lists(st.tuples(st.floats(0, 4), events), max_size=60))
@settings(max_examples=300, deadline=None)
def test_one_machine_under_any_events(story: list[tuple[float, object]]) -> None:
    state, now, books = fresh(), 18.0, Books()
    asked: list[act.ComputeStep] = []
    fetches: list[act.FetchConsensus] = []
    for gap, item in story:
        now += gap
        event: act.Event
        if item == "aggregated":
            event = act.StepReady(entry_for(state, asked[-1])) if asked else act.Tick()
        elif item == "fetched":
            target = fetches[-1].target if fetches else b"z" * 32
            event = act.ConsensusFetched(target, state.log.entries)  # not the right chain
        else:
            assert isinstance(item, act.Event)
            event = item
        before = state
        state, actions = step(state, event, now)
        assert step(before, event, now) == (state, actions)  # pure
        if isinstance(event, act.UpdateReady):
            books.offered.add(event.ref)
        for action in actions:
            books.see(action)
            asked += [action] if isinstance(action, act.ComputeStep) else []
            fetches += [action] if isinstance(action, act.FetchConsensus) else []
            until = getattr(action, "until_s", None)
            assert until is None or now <= until <= RULES.period_s * (state.round + 1)
        check_time(state, now)
        books.check(state)


def test_alone_in_its_block() -> None:
    """Our own update is the consensus step, and nothing is waited for."""
    state = fresh()
    for number in (1, 2, 3):
        opens = 20.0 * number
        state, actions = step(state, act.Tick(), opens)
        assert act.MakeUpdate(number, ()) in actions
        state, actions = step(state, act.UpdateReady(number, own(number), 10), opens + 0.1)
        if number == 1:  # in the first round there may be others that we do not know
            state, actions = step(state, act.Tick(), opens + 6.0)
        wanted = [a for a in actions if isinstance(a, act.ComputeStep)]
        assert [a.refs for a in wanted] == [(own(number),)]
        ready = act.StepReady(entry_for(state, wanted[0]))
        state, actions = step(state, ready, opens + 6.1)
        assert act.Settle(own(number), SCALE_ONE) in actions
        assert state.log.head.round == number


def test_a_newcomer_sends_nothing_in_its_first_round() -> None:
    state = RoundState("me", RULES, ConsensusLog((START,)), warm_until=7, round=6)
    state, actions = step(state, act.Tick(), 140.0)
    assert not any(isinstance(a, act.MakeUpdate) for a in actions)
    assert any(isinstance(a, act.PublishRecord) and a.update is None for a in actions)
    state, actions = step(state, act.Tick(), 160.0)
    assert any(isinstance(a, act.MakeUpdate) for a in actions)


def test_an_update_that_comes_too_late_goes_back() -> None:
    state, _ = step(fresh(), act.Tick(), 20.0)
    state, actions = step(state, act.UpdateReady(1, own(1), 10), 27.0)
    assert act.ReturnToFeedback(own(1)) in actions
    assert not state.in_flight


def test_in_flight_stays_out_of_the_next_update() -> None:
    """Round 1 was not decided here, so our update may be in the others' consensus, or not."""
    state, _ = step(fresh(), act.Tick(), 20.0)
    state, _ = step(state, act.UpdateReady(1, own(1), 10), 20.1)
    state, actions = step(state, act.Tick(), 40.0)
    assert act.MakeUpdate(2, (own(1),)) in actions
    assert not any(isinstance(a, act.ReturnToFeedback | act.Settle) for a in actions)


def test_left_out_goes_back() -> None:
    state, _ = step(fresh(), act.Tick(), 20.0)
    state, _ = step(state, act.UpdateReady(1, own(1), 10), 20.1)
    part = Contribution(theirs(0, 1).digest, "p0", SCALE_ONE)
    ready = act.StepReady(Entry(1, START.digest, bytes(32), bytes(32), 1, (part,)))
    state, actions = step(state, ready, 30.0)
    assert act.ReturnToFeedback(own(1)) in actions
    assert not state.in_flight


def test_who_slept_through_a_deadline_waits_for_the_next_round() -> None:
    state, actions = step(fresh(), act.Tick(), 39.0)
    assert not any(isinstance(a, act.MakeUpdate) for a in actions)
    assert next_wakeup_s(state, 39.0) == 40.0


def test_replays_are_refused() -> None:
    state = fresh()
    used = Contribution(theirs(0, 1).digest, "p0", SCALE_ONE)
    log = state.log.appended(Entry(1, START.digest, bytes(32), bytes(32), 1, (used,)))
    state = RoundState("me", RULES, log, round=1)
    state, _ = step(state, act.Tick(), 40.0)
    record = act.PeerRecord("p0", 2, log.head.digest, 1, theirs(0, 1), 10, 2.0)
    state, actions = step(state, record, 40.5)
    assert not any(isinstance(a, act.Pull) for a in actions)
    state, actions = step(state, act.Tick(), 60.0)
    report = next(a for a in actions if isinstance(a, act.RoundReport))
    assert report.refused == (("p0", "replay"),)


def test_nobody_is_framed_by_a_foreign_record() -> None:
    state, _ = step(fresh(), act.Tick(), 20.0)
    record = act.PeerRecord("p0", 1, START.digest, -1, theirs(1, 1), 10, 2.0)
    _, actions = step(state, record, 20.5)
    assert not actions


def test_a_vote_that_overtakes_its_record_brings_the_offer() -> None:
    """Heard first of all from a peer, its vote must not make it look like one with no update."""
    log = fresh().log
    state = RoundState("me", RULES, log, warm_until=0, round=1)
    state, _ = step(state, act.PeerRecord("p0", 1, START.digest, -1, None, 0, 2.0), 39.0)
    state, _ = step(state, act.Tick(), 40.0)
    state, _ = step(state, act.UpdateReady(2, own(2), 10), 40.1)
    vote = Vote("p0", 2, START.digest, -1, tuple(sorted([own(2), theirs(0, 2), theirs(1, 2)])))
    state, actions = step(state, act.VoteArrived(vote), 40.2)
    assert [a.ref for a in actions if isinstance(a, act.Pull)] == [theirs(0, 2)]
    assert not any(isinstance(a, act.SendVote) for a in actions)
    state, actions = step(state, act.UpdateArrived(theirs(0, 2)), 40.3)
    sent = next(a.vote for a in actions if isinstance(a, act.SendVote))
    assert theirs(0, 2) in sent.listed


def test_an_exchange_must_fit_into_a_period() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        RoundRules(0.0, 5.0, DeadlineRules(1.0, 6.0), 1.5, 1.5)
