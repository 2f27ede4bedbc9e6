"""Background tasks: kept while they run, failures logged, cancelled together."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from node.machine.tasks import BackgroundTasks

LOG = logging.getLogger("tests.tasks")


async def fail(error: Exception) -> None:
    raise error


def test_a_failure_is_logged_unless_it_is_expected(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        tasks = BackgroundTasks(LOG, "a task failed", (LookupError,))
        tasks.spawn(fail(KeyError("somebody else tells of it")))
        tasks.spawn(fail(ValueError("nobody else does")))
        async with asyncio.timeout(20):
            while len(tasks):  # noqa: ASYNC110  the callbacks of the two have to come
                await asyncio.sleep(0)

    asyncio.run(main())
    assert [record.message for record in caplog.records] == ["a task failed"]
    assert "nobody else does" in caplog.text and "somebody else" not in caplog.text


def test_what_nobody_else_holds_is_kept() -> None:
    async def main() -> None:
        tasks, done = BackgroundTasks(LOG, "a task failed"), asyncio.Event()

        async def work() -> None:
            await asyncio.sleep(0)
            done.set()

        tasks.spawn(work())
        gc.collect()
        async with asyncio.timeout(20):
            await done.wait()

    asyncio.run(main())


def test_all_are_cancelled_before_any_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        tasks, begun, ended = BackgroundTasks(LOG, "a task failed"), asyncio.Semaphore(0), []

        async def work(name: str) -> None:
            try:
                begun.release()
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)  # ends later than it was told to
                ended.append(name)

        tasks.spawn(work("kept"))
        other = asyncio.create_task(work("other"))
        for _ in range(2):
            await begun.acquire()
        await tasks.cancel(other)
        assert sorted(ended) == ["kept", "other"]
        assert other.cancelled() and not tasks

    asyncio.run(main())
    assert caplog.records == []
