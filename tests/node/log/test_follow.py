"""Following the log of another block: chosen rounds, liars, forks, and nobody there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.log.fetch import FetchError, RemoteLog
from node.log.follow import ASKED_PER_LOOK_UP, Follower, FollowSettings
from protocol.identity import peer_text
from protocol.log import Contribution, Entry, genesis
from protocol.messages import Message, Purpose
from swarm.consensus.forks import AWAY
from swarm.consensus.log import ConsensusLog
from tests.support.chains import CODEC, EVERY, FIRST, RUN, Chain, Donors, identity, run


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(identity(tmp_path))


def follower_of(donors: Donors, names: Sequence[str]) -> Follower:
    async def find(block: int) -> Sequence[str]:
        return names

    settings = FollowSettings(RUN, 0, CODEC, EVERY, Purpose.RELAY, ask_s=1.0)
    return Follower(settings, FIRST, donors, find)


def test_round_after_round_costs_only_aggregates(chain: Chain) -> None:
    donors = Donors(a=chain)
    follower = follower_of(donors, ["a"])
    for _ in range(10):
        chain.grow(1)
        assert run(follower.advance())
        assert follower.round == chain.log.head.round
        assert np.array_equal(follower.consensus.weights, chain.consensus.weights)
    assert not run(follower.advance())
    assert {kind for _, kind in donors.asked} == {"LogRequest", "AggregateRequest"}
    assert len(follower.consensus.steps) <= 2 * EVERY


def test_donors_are_looked_up_now_and_then_and_when_one_is_silent(chain: Chain) -> None:
    donors, looked_up = Donors(a=chain, b=chain), []
    follower = follower_of(donors, ["a", "b"])
    find = follower.donors

    async def counted(block: int) -> Sequence[str]:
        looked_up.append(block)
        return await find(block)

    follower.donors = counted

    def advance_once() -> int:
        chain.grow(1)
        assert run(follower.advance())
        return len(looked_up)

    assert [advance_once() for _ in range(ASKED_PER_LOOK_UP + 1)] == [1] * ASKED_PER_LOOK_UP + [2]
    donors.down = {"b"}
    assert advance_once() == 2  # as many as before: nobody knows yet that it is gone
    assert advance_once() == 3


def test_it_stops_at_the_round_that_was_asked_for(chain: Chain) -> None:
    chain.grow(6)
    follower = follower_of(Donors(a=chain), ["a"])
    assert run(follower.advance(3))
    assert follower.round == 3
    assert run(follower.advance(5)) and follower.round == 5


def test_a_long_missed_copy_starts_from_a_snapshot(chain: Chain) -> None:
    donors = Donors(a=chain)
    follower = follower_of(donors, ["a"])
    chain.grow(20)
    assert run(follower.advance())
    assert "ShardRequest" in {kind for _, kind in donors.asked}
    assert np.array_equal(follower.consensus.weights, chain.consensus.weights)


def test_what_most_donors_have_wins_over_one_with_more_rounds(chain: Chain) -> None:
    chain.grow(3)
    liar = chain.fork(9).grow(5)
    follower = follower_of(Donors(liar=liar, a=chain, b=chain), ["liar", "a", "b"])
    assert run(follower.advance())
    assert follower.log.head == chain.log.head


def test_contributors_of_the_log_so_far_outweigh_strangers(chain: Chain) -> None:
    me = peer_text(chain.identity.peer_id)
    names = [me]
    chain.grow(3)
    donors = Donors(**{me: chain})
    follower = follower_of(donors, names)
    assert run(follower.advance()) and follower.round == 2
    poisoned = chain.fork(9).grow(5)
    for name in ("x", "y", "z", "w"):
        donors.add(name, poisoned)
        names.insert(0, name)  # the lookup names the contributor last
    follower._known = ([], 0)
    chain.grow(1)
    assert run(follower.advance())
    assert follower.log.head == chain.log.head
    assert not run(follower.advance())  # it has nothing newer: then nobody has
    # None of them answers any more: what most of the others have.
    donors.down = {me}
    follower._known = ([], 0)
    assert run(follower.advance()) and follower.log.head == poisoned.log.head


class Turned:
    """A copy of a block that three worked on, and the block some rounds later, worked on by others.

    Logs alone: `chosen` says whose the copy would take.
    """

    OLD, NEW = ("A", "B", "C"), ("D", "E", "F")

    def __init__(self) -> None:
        self.old = self.grown(ConsensusLog((genesis("run", 0, bytes(32)),)), self.OLD, 40)
        self.new = self.grown(self.old, self.NEW, AWAY + 4)
        self.follower = follower_of(Donors(), [])
        self.follower.log = self.old

    def grown(self, log: ConsensusLog, members: Sequence[str], rounds: int) -> ConsensusLog:
        for number in range(log.head.round + 1, log.head.round + 1 + rounds):
            parts = tuple(
                Contribution(f"{member}{number}".encode().ljust(32), member, 65536)
                for member in members
            )
            entry = Entry(number, log.head.digest, bytes(32), bytes(32), 100, parts)
            log = log.appended(entry)
        return log

    def chosen(self, logs: Mapping[str, ConsensusLog], to_round: int | None = None) -> bytes:
        remote = {name: RemoteLog(log.entries, ()) for name, log in logs.items()}
        entry, _ = self.follower._choose(remote, to_round)
        return (entry or self.old.head).digest


def test_one_who_is_left_of_many_neither_holds_a_copy_back_nor_leads_it_away() -> None:
    block = Turned()
    others = dict.fromkeys(block.NEW, block.new)
    own_way = block.grown(block.old, ["A"], AWAY + 5)
    assert block.chosen({"A": block.old, **others}) == block.new.head.digest
    assert block.chosen({"A": own_way, **others}) == block.new.head.digest
    # Two of three still speak for it, and what two strangers of three say is nothing.
    assert block.chosen({"A": block.old, "B": block.old, "D": block.new}) == block.old.head.digest
    assert (
        block.chosen(dict.fromkeys("AB", own_way) | dict.fromkeys("DE", block.new))
        == own_way.head.digest
    )


def test_contributors_that_the_block_left_long_ago_do_not_hold_a_copy_back() -> None:
    block = Turned()
    stuck, others = dict.fromkeys("AB", block.old), dict.fromkeys("DE", block.new)
    now = block.new.head.round
    assert block.chosen({**stuck, **others}, now) == block.new.head.digest
    # One that went on with the others is one of them.
    own_way = block.grown(block.old, ["A"], AWAY + 5)
    assert block.chosen({"A": block.old, "B": own_way, **others}, now) == block.new.head.digest


@pytest.mark.parametrize("behind", [1, AWAY])
def test_a_long_log_that_strangers_made_up_does_not_make_contributors_look_left(
    behind: int,
) -> None:
    """They claim rounds that were not yet, while the block rests for a few."""
    block = Turned()
    resting, made_up = dict.fromkeys("AB", block.old), dict.fromkeys("DEFGH", block.new)
    now = block.old.head.round + behind
    assert block.chosen({**resting, **made_up}, now) == block.old.head.digest
    assert block.chosen({**resting, **made_up}) == block.old.head.digest


def test_one_donors_answer_that_breaks_our_code_costs_that_answer(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain.grow(2)
    donors = Donors(a=chain, b=chain)
    ask = donors.ask

    async def breaks(peer: str, *rest: Any) -> Any:
        if peer == "a":
            raise UnicodeError("label empty or too long")
        return await ask(peer, *rest)

    monkeypatch.setattr(donors, "ask", breaks)
    follower = follower_of(donors, ["a", "b"])
    assert run(follower.advance()) and follower.round == 1


def test_it_leaves_a_branch_that_was_given_up(chain: Chain) -> None:
    chain.grow(3)
    branch = chain.fork(9).grow(1)
    donors = Donors(a=branch)
    follower = follower_of(donors, ["a"])
    assert run(follower.advance())
    donors.add("a", chain.grow(2))
    assert run(follower.advance())
    assert follower.log.head == chain.log.head


def test_a_liar_is_not_asked_again_and_the_copy_stays(chain: Chain) -> None:
    donors = Donors(bad=chain)
    follower = follower_of(donors, ["bad"])
    chain.grow(2)

    def nonsense(request: Message, payload: bytes) -> bytes:
        return b"\x91\xc4\x01x" if type(request).__name__ == "AggregateRequest" else payload

    donors.spoil = {"bad": nonsense}
    with pytest.raises(FetchError):
        run(follower.advance())
    assert follower.round == -1 and follower.liars == {"bad"}
    with pytest.raises(FetchError):
        run(follower.advance())
    assert donors.asked.count(("bad", "AggregateRequest")) == 1


def test_nobody_there_leaves_the_copy_as_it_is(chain: Chain) -> None:
    donors = Donors(a=chain)
    follower = follower_of(donors, ["a"])
    chain.grow(2)
    run(follower.advance())
    donors.down = {"a"}
    with pytest.raises(FetchError):
        run(follower.advance())
    assert follower.round == 1
