"""Votes and what they agree on."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from protocol.votes import Reason, UpdateRef, Vote
from swarm.consensus.votes import Ballot, agreed_set

BASE = bytes(32)


def ref(i: int) -> UpdateRef:
    return UpdateRef(bytes([i]) * 32, f"p{i}")


def vote(voter: int, *listed: int, base: bytes = BASE) -> Vote:
    return Vote(f"p{voter}", 5, base, 4, tuple(sorted(ref(i) for i in listed)))


ballots = st.lists(
    st.builds(lambda v, s: vote(v, *s), st.integers(0, 5), st.sets(st.integers(0, 5))), max_size=12
)


@given(ballots, st.randoms(use_true_random=False))
def test_order_and_repetition_change_nothing(votes: list[Vote], rng: random.Random) -> None:
    one, other = Ballot(), Ballot()
    for v in votes:
        one = one.with_vote(v)
    again = votes + votes[:3]
    rng.shuffle(again)
    for v in again:
        other = other.with_vote(v)
    assert one.two_faced == other.two_faced
    assert agreed_set(one.counted(BASE, ())) == agreed_set(other.counted(BASE, ()))


@given(ballots)
def test_agreed_is_what_more_than_half_list(votes: list[Vote]) -> None:
    agreed = agreed_set(votes)
    assert list(agreed) == sorted(set(agreed))
    for i in range(6):
        listed = sum(ref(i) in v.listed for v in votes)
        assert (ref(i) in agreed) == (2 * listed > len(votes))


def test_other_bases_and_strangers_do_not_count() -> None:
    ballot = Ballot()
    for v in (vote(0, 0, 1), vote(1, 0), vote(2, 3, base=b"x" * 32), vote(3, 3), vote(4, 3)):
        ballot = ballot.with_vote(v)
    assert agreed_set(ballot.counted(BASE, {"p0", "p1"})) == (ref(0),)
    assert agreed_set(ballot.counted(BASE, {"nobody"})) == ()  # then all on the base: 2 against 2
    assert ballot.holders(ref(3)) == ("p2", "p3", "p4")


def test_two_faced_votes_void_each_other() -> None:
    ballot = Ballot().with_vote(vote(0, 1)).with_vote(vote(0, 2)).with_vote(vote(0, 1))
    assert not ballot.votes
    assert ballot.two_faced == {"p0"}


def test_one_update_per_sender() -> None:
    twins = (UpdateRef(b"a" * 32, "p"), UpdateRef(b"b" * 32, "p"))
    assert agreed_set([Vote("v", 1, BASE, 0, twins)]) == twins[:1]


def test_reasons_decide_nothing() -> None:
    declining = replace(vote(0, 0, 1), declined=(("p1", Reason.HARM),))
    assert agreed_set([declining, vote(1, 1)]) == (ref(1),)
