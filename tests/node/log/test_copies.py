"""Copies of other blocks: taken over from the work on another block, and renewed whatever comes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from node.log.copies import Copies
from tests.support.live import tiny_run_file

RUN = bytes(32)


class Work:
    """What copies ask for donors: it is what they must not keep for ever."""

    def __init__(self, block: int, peers: Any = None) -> None:
        run_file = tiny_run_file(blocks=3, coupling="relay")
        self.looked_up: list[int] = []
        self.copies = Copies(run_file, RUN, block, peers, self.donors, lambda: 1e12, self.renew)

    async def donors(self, block: int) -> Sequence[str]:
        self.looked_up.append(block)
        return ["somebody"]

    async def renew(self, weights: Any) -> None:
        pass


def test_copies_that_are_taken_over_let_the_old_work_go() -> None:
    old = Work(1)
    kept, followers = weakref.ref(old), old.copies.followers
    new = Work(2)
    new.copies.adopt(followers)
    assert new.copies.followers[0] is followers[0]
    del old
    gc.collect()
    assert kept() is None

    async def ask() -> None:
        await new.copies.followers[0].donors(0)

    asyncio.run(ask())
    assert new.looked_up == [0]


def test_an_answer_that_breaks_our_code_does_not_end_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Breaks:
        asked = 0

        async def ask(self, *_: object) -> Any:
            self.asked += 1
            raise UnicodeError("label empty or too long")

    peers = Breaks()
    work = Work(1, peers)

    async def main() -> None:
        loop = asyncio.create_task(work.copies.run())
        for number in range(3):
            work.copies.begin(number)
            async with asyncio.timeout(10.0):
                while peers.asked <= number:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert not loop.done()
        # Also what is not a donor's: of the lookup, say.
        work.copies.followers[0].donors = _broken
        work.copies.followers[0]._known = ([], 0)
        work.copies.begin(3)
        await asyncio.sleep(0.05)
        assert not loop.done()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    asyncio.run(main())
    assert "UnicodeError" in caplog.text and "ZeroDivisionError" in caplog.text


async def _broken(block: int) -> Sequence[str]:
    raise ZeroDivisionError
