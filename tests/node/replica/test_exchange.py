"""Votes that are kept for others: those that count are among them, whoever else votes."""

from __future__ import annotations

import pytest

from node.replica.exchange import VOTES_KEPT, Exchange, ReplicaSettings
from protocol.identity import Identity, new_identity, peer_text
from protocol.limits import VOTES_PER_REPLY
from protocol.votes import SignedVote, Vote, seal_vote
from swarm.consensus.updates import UpdateCodec
from swarm.rounds import actions as act
from tests.support.chains import Donors
from tests.support.one_replica import RULES

RUN, ROUND = bytes(32), 5
SETTINGS = ReplicaSettings(RUN, 0, RULES, UpdateCodec("int8", 1000), 16)


def vote_of(voter: Identity) -> SignedVote:
    return seal_vote(voter, RUN, 0, Vote(voter.text, ROUND, bytes(32), -1, ()))


@pytest.mark.parametrize("strangers_first", [True, False])
def test_votes_of_strangers_do_not_displace_those_that_count(strangers_first: bool) -> None:
    mates = [new_identity() for _ in range(3)]
    heard: list[act.Event] = []
    counted = [peer_text(mate.peer_id) for mate in mates]
    exchange = Exchange(
        SETTINGS, new_identity(), Donors(), lambda: 0.0, heard.append, lambda: counted
    )
    strangers = [new_identity() for _ in range(VOTES_KEPT + 10)]
    voters = [*strangers, *mates] if strangers_first else [*mates, *strangers]
    for voter in voters:
        exchange.hear_vote(vote_of(voter).blob, ROUND)
    kept = exchange.votes_of(ROUND)
    assert len(kept) == VOTES_KEPT
    handed_on = {signed.vote.voter for signed in kept[:VOTES_PER_REPLY]}
    assert {mate.text for mate in mates} <= handed_on
    exchange.forget_before(ROUND + 1)
    assert exchange.votes_of(ROUND) == []
