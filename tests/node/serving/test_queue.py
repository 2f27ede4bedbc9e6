"""The queue before a block: whatever fails there, the next sweep is computed.

With a carrier that only writes down what is carried; the block is a real one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from node.serving.parts import PartsUnderWay
from node.serving.queue import Job, SweepQueue
from node.serving.sessions import Sessions
from protocol.identity import peer_id_of
from protocol.parcel import Parcel
from protocol.serving import Hop, Mode, Sweep, Trouble
from swarm.learning.model import Block
from swarm.run import Run
from tests.conftest import MakeModel, MakeRun

PEER = peer_id_of(b"p" * 32)
LIMIT_S = 30.0


def job(number: int, start: int = 0) -> Job:
    sweep = Sweep(
        run=b"r" * 32,
        block=0,
        sweep=bytes([number]) * 16,
        mode=int(Mode.VERIFY),
        place=0,
        route=(Hop(0, b"d" * 32, 1.0, (PEER,)).pack(),),
        context=3,
        length=2,
        start=start,
        session=bytes([number]) * 16,
        temperature=1.0,
        budget_s=60.0,
        hop_s=10.0,
    )
    parcel = Parcel(
        np.frombuffer(b"abc", np.uint8), np.zeros((1, 0), np.uint8), None, None, None, None
    )
    return Job(sweep, parcel, PEER, time.monotonic() + 60.0, 100)


class FakeCarrier:
    """Carries nothing, and remembers what it was given."""

    def __init__(self) -> None:
        self.carried: list[Job] = []
        self.troubles: list[int] = []

    def with_client(self, one: Job) -> Sweep:
        return one.sweep

    async def fail(self, sweep: Sweep, trouble: int, *_: object) -> None:
        self.troubles.append(trouble)

    async def carry(self, one: Job, *_: object) -> None:
        self.carried.append(one)

    async def close(self) -> None:
        pass


def through(
    run: Run, module_of: Callable[[bytes], Block | None], batches: list[list[Job]]
) -> tuple[FakeCarrier, SweepQueue]:
    """Each batch waits in the queue before it is computed, and is gone before the next comes."""
    carrier = FakeCarrier()

    async def main() -> SweepQueue:
        queue = SweepQueue(cast(Any, carrier), Sessions(run), PartsUnderWay(run), None, module_of)
        queue.start()
        try:
            for batch in batches:
                for one in batch:
                    queue.put(one)
                async with asyncio.timeout(LIMIT_S):
                    await asyncio.gather(*(one.handed.wait() for one in batch))
            assert queue.worker is not None and not queue.worker.done()
        finally:
            await queue.stop()
        return queue

    return carrier, asyncio.run(main())


def test_a_version_that_cannot_be_built_fails_its_sweeps_alone(
    tiny_run: MakeRun, tiny_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    block = tiny_model(run).blocks[0]
    builds: list[Callable[[], Block | None]] = [_no_memory, lambda: block]

    def module_of(_: bytes) -> Block | None:
        return builds.pop(0)()

    with caplog.at_level(logging.ERROR):
        carrier, queue = through(run, module_of, [[job(1), job(2)], [job(3)]])
    assert carrier.troubles == [Trouble.INTERNAL] * 2 and len(carrier.carried) == 1
    assert queue.held_bytes == 0 and not queue.jobs
    assert "a block could not be computed" in caplog.text


def test_caches_that_cannot_be_made_fail_their_batch_alone(
    tiny_run: MakeRun, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run()
    block = tiny_model(run).blocks[0]
    assert block is not None
    honest, calls = block.new_cache, iter([True, False])

    def new_cache() -> Any:
        return honest() if next(calls, True) else _no_memory()

    monkeypatch.setattr(block, "new_cache", new_cache)
    # Of two sweeps the second gets no cache; both are told, and each of them once.
    carrier, queue = through(run, lambda _: block, [[job(1), job(2)], [job(3)]])
    assert carrier.troubles == [Trouble.INTERNAL] * 2 and len(carrier.carried) == 1
    assert queue.held_bytes == 0 and not queue.jobs


def test_a_lost_session_and_a_version_that_is_gone(
    tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    run = tiny_run()
    block = tiny_model(run).blocks[0]
    modules = [block, None]
    carrier, queue = through(run, lambda _: modules.pop(0), [[job(1, start=4)], [job(2)]])
    assert carrier.troubles == [Trouble.NO_SESSION] * 2 and not carrier.carried
    assert queue.held_bytes == 0 and not queue.jobs


def test_a_sweep_leaves_once(tiny_run: MakeRun) -> None:
    """Also if sending it on fails half way, and it is reported besides."""

    async def main() -> None:
        run = tiny_run()
        carrier = cast(Any, FakeCarrier())
        queue = SweepQueue(carrier, Sessions(run), PartsUnderWay(run), None, lambda _: None)
        one = job(1)
        queue.put(one)
        queue._release(one)
        queue._release(one)
        assert queue.held_bytes == 0
        await queue.stop()

    asyncio.run(main())


def _no_memory() -> Any:
    raise MemoryError
