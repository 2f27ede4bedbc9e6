"""When a live host leaves its block: what it sees in the records, and what it makes of it."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from node.host.block_choice import UNLIMITED, BlockWatch, choose_block, hosts_of
from protocol.errors import UsageError
from protocol.frames import Stalled
from protocol.identity import new_identity, peer_text
from protocol.records import Role
from swarm.assignment import MoveRules, must_stay
from tests.support.live import tiny_run_file

BLOCKS = 3
EAGER = MoveRules(rest_rounds=4, patience_rounds=2)


class Records:
    """What the DHT says: for each block the rounds of its hosts' records.

    It is all of a network that the choice of a block asks, and stands for one (as Any).
    """

    def __init__(self, **rounds: list[int]) -> None:
        self.identity = new_identity()
        self.peer_id = self.identity.peer_id
        self.found: dict[int, list[Any]] = {}
        for name, numbers in rounds.items():
            self.found[int(name[1:])] = [self._record(number) for number in numbers]

    def _record(self, number: int, role: int = Role.REPLICA) -> Any:
        record = SimpleNamespace(round=number, role=role)
        return SimpleNamespace(peer_id=new_identity().peer_id, record=record)

    async def replicas(self, block: int) -> list[Any]:
        found = self.found.get(block)
        if found is None:
            raise Stalled("nobody")
        return found


def watch(records: Any, **changes: Any) -> BlockWatch:
    rng: Any = SimpleNamespace(choice=random.Random(0).choice, random=lambda: 0.0)
    run = tiny_run_file(blocks=BLOCKS)
    return BlockWatch(records, run, changes.get("memory", UNLIMITED), EAGER, rng)


def looks(
    watched: BlockWatch, count: int, own: int = 0, here: int = 10, left: int = UNLIMITED
) -> list[int | None]:
    async def main() -> list[int | None]:
        return [await watched.look(own, 20, here, left) for _ in range(count)]

    return asyncio.run(main())


def not_needed(records: Records) -> Records:
    """So that we are not the one who has to stay."""
    mates = [peer_text(s.peer_id) for s in records.found[0]]
    while True:
        records.peer_id = new_identity().peer_id
        if not must_stay(peer_text(records.peer_id), mates, 1):
            return records


def test_a_lost_block_is_taken_over_after_some_patience() -> None:
    records = not_needed(Records(b0=[20, 19], b1=[20], b2=[]))
    assert looks(watch(records), 2) == [None, 2]
    # Its hosts were killed: their records live on, but say no newer round.
    records.found[2] = [records._record(16)]
    assert looks(watch(records), 2) == [None, 2]
    # One that only serves does not train it.
    records.found[2] = [records._record(20, Role.SERVER)]
    assert looks(watch(records), 2) == [None, 2]
    for block in (1, 2):  # and one that was heard lately does: with two on each nobody is in need
        records.found[block] = [records._record(18), records._record(20)]
    assert looks(watch(records), 4) == [None] * 4


def test_who_is_alone_on_its_block_or_sees_nobody_stays() -> None:
    assert looks(watch(Records(b0=[], b1=[20], b2=[])), 4) == [None] * 4
    with pytest.raises(Stalled):
        looks(watch(Records(b0=[20])), 1)


def test_it_rests_first_and_minds_its_limits() -> None:
    records = not_needed(Records(b0=[20, 20], b1=[20], b2=[]))
    assert looks(watch(records), 4, here=3) == [None] * 4
    assert watch(records).resting(1) and not watch(records).resting(2)
    assert looks(watch(records), 4, left=1000) == [None] * 4
    assert looks(watch(records, memory=1000), 4) == [None] * 4


def test_a_need_that_passes_is_forgotten() -> None:
    records = not_needed(Records(b0=[20, 20], b1=[20, 20], b2=[]))
    watched = watch(records)
    assert looks(watched, 1) == [None]
    records.found[2] = [records._record(20), records._record(20)]
    assert looks(watched, 1) == [None]
    records.found[2] = []
    assert looks(watched, 2) == [None, 2]


def test_too_few_is_a_need_only_while_no_block_is_lost() -> None:
    """Two hosts a block are wanted: of four on one block two may go, of two none."""
    few = Records(b0=[20, 20], b1=[20], b2=[20, 20])
    mates = {peer_text(s.peer_id) for s in few.found[0]}
    while must_stay(peer_text(few.peer_id), mates, 2):
        few.peer_id = new_identity().peer_id
    assert looks(watch(few), 2) == [None, 1]
    assert looks(watch(Records(b0=[20], b1=[20], b2=[20, 20])), 4) == [None] * 4


def test_the_first_choice_counts_who_is_there_now() -> None:
    run = tiny_run_file(blocks=BLOCKS)

    def chosen(records: Any, wanted: int | None = None) -> int:
        return asyncio.run(choose_block(records, run, wanted, UNLIMITED, 20))

    assert chosen(Records(b0=[20], b1=[20, 20], b2=[3, 4, 5])) == 2
    assert chosen(Records(b0=[20], b2=[20])) == 1  # nobody answers for it
    assert chosen(Records(b0=[20], b1=[20], b2=[20]), 1) == 1
    with pytest.raises(UsageError, match="16 hosts"):
        chosen(Records(b0=[20] * 16), 0)
    records: Any = Records(b0=[20, 1])
    assert len(asyncio.run(hosts_of(records, 0, 20))) == 1


def test_a_round_that_has_not_begun_is_nobodys() -> None:
    run = tiny_run_file(blocks=BLOCKS)
    records: Any = Records(b0=[20, 21, 22, 2**39], b1=[2**39] * 16, b2=[20])
    assert len(asyncio.run(hosts_of(records, 0, 20))) == 2
    assert asyncio.run(choose_block(records, run, None, UNLIMITED, 20)) == 1
    before: Any = Records(b0=[0])  # the run begins in a while: all say 0
    assert len(asyncio.run(hosts_of(before, 0, -7))) == 1
