"""A queue of all work that reads or changes the running weights, done in the order it was put.

Corrections, updates and saved states are only right if all work before them is done and none after
them. Once the weights are lost, work is skipped until a reset sets them anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from node.trainer.trainer import TrainerError

_log = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None]]


class WeightsQueue:
    """Runs work on the weights in order. Calls `on_lost` when an order to the trainer fails."""

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self.on_lost = on_lost
        self.lost = False
        self._work: asyncio.Queue[tuple[Work, bool, Callable[[], None]]] = asyncio.Queue()

    def put(self, work: Work, skipped: Callable[[], None] = lambda: None) -> None:
        """Queue work. If the weights are lost when its turn comes, `skipped` is called instead."""
        self._work.put_nowait((work, False, skipped))

    def put_reset(self, work: Work) -> None:
        """Queue work that replaces all weights; clears `lost`."""
        self._work.put_nowait((work, True, lambda: None))

    def lose(self, why: str) -> None:
        """Mark the weights as lost: work before the next reset is skipped."""
        self.lost = True
        self.on_lost(why)

    async def run(self) -> None:
        while True:
            work, resets, skipped = await self._work.get()
            if self.lost and not resets:
                skipped()
                continue
            try:
                await work()
            except TrainerError as error:
                self.lose(error.message)
            except Exception:
                _log.exception("work on the weights failed")
            else:
                self.lost = self.lost and not resets
