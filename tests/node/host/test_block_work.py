"""Whom a host asks for the logs of other blocks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from node.host.block_work import BlockWork
from tests.support.strangers import many, record_of

START_S, PERIOD_S, NUMBER = 1000.0, 10.0, 100


def donors_of(found: list[Any]) -> list[str]:
    """All of a block's work that matters here: the network, the rules and the clock."""

    async def replicas(block: int, cap: int) -> list[Any]:
        return found[:cap]

    work: Any = BlockWork.__new__(BlockWork)
    work.network = SimpleNamespace(peer_id=many(1)[0].peer_id, replicas=replicas)
    work.premises = SimpleNamespace(rules=SimpleNamespace(start_s=START_S, period_s=PERIOD_S))
    work.now_s = lambda: START_S + NUMBER * PERIOD_S
    return list(asyncio.run(work._donors(0)))


def test_a_claimed_round_brings_nobody_to_the_front() -> None:
    honest, liars = many(4), many(4)
    found = [record_of(p, round=NUMBER) for p in honest]
    found += [record_of(p, round=2**39) for p in liars[:2]]
    found += [record_of(p, round=NUMBER + 1) for p in liars[2:]]
    assert donors_of(found) == [p.text for p in [*honest, *liars[2:]]]


def test_who_has_not_been_here_for_a_while_comes_last() -> None:
    gone, there = many(2)
    found = [record_of(gone, round=NUMBER - 9), record_of(there, round=NUMBER - 1)]
    assert donors_of(found) == [there.text, gone.text]
