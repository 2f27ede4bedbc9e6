"""Background tasks of one owner: referenced while they run, failures logged, cancelled together.

asyncio's loop holds tasks only weakly: one without other references may be garbage-collected while
it runs, and its error lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable


class BackgroundTasks:
    """One owner's tasks. `failed` is the log message for errors that are not `expected`."""

    def __init__(
        self, log: logging.Logger, failed: str, expected: tuple[type[BaseException], ...] = ()
    ) -> None:
        self._log, self._failed, self._expected = log, failed, expected
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._finished)

    async def cancel(self, *others: asyncio.Task[None]) -> None:
        """Cancel all running tasks and `others` at the same time, and wait for their end."""
        tasks = [*others, *self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, self._expected):
            self._log.error(self._failed, exc_info=error)
