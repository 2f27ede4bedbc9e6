"""Answers that wait for our own word: not for long, not for old rounds, once for each peer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from node.replica.held_answers import HeldAnswers
from node.simulator.virtual_time import run_virtually


def test_an_answer_waits_for_our_word_and_whoever_hears_it_is_named() -> None:
    async def main() -> None:
        held = HeldAnswers(1.0)
        asked = [asyncio.create_task(held.until_said(peer, 5)) for peer in ("a", "b")]
        early = asyncio.create_task(held.until_said("c", 6))
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in asked)
        assert held.say(5) == {"a", "b"}
        await asyncio.gather(*asked)
        assert not early.done()
        assert held.say(6) == {"c"}
        await early
        assert held.say(6) == frozenset()

    run(main())


def test_nobody_waits_for_what_was_said_or_for_long() -> None:
    async def main() -> None:
        held, loop = HeldAnswers(1.0), asyncio.get_running_loop()
        held.say(5)
        began_s = loop.time()
        await held.until_said("a", 4)
        await held.until_said("a", 5)
        assert loop.time() == began_s
        await held.until_said("a", 6)
        assert 0.99 < loop.time() - began_s < 1.1
        assert held.say(6) == frozenset()  # it has its answer, without our word: it is to be told

    run(main())


def test_a_peer_that_asks_twice_or_about_a_round_that_never_came_is_answered() -> None:
    async def main() -> None:
        held = HeldAnswers(60.0)
        first = asyncio.create_task(held.until_said("a", 5))
        gone = asyncio.create_task(held.until_said("b", 5))
        await asyncio.sleep(0)
        await held.until_said("a", 5)  # at once: one answer for each peer is held
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert held.say(7) == frozenset()  # what we say is of another round than it asked about
        await first
        assert not held._waiting

    run(main())


def run(work: Coroutine[Any, Any, None]) -> None:
    run_virtually(work)
