"""What touches the running weights, one thing after another, in the order in which it was decided.

Corrections, updates and saved states all read or change the weights of the training process; each
is right only if all before it are done and none after it. Decides that order, and that after the
process was lost nothing is done until its weights are set anew. Knows nothing of rounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from node.trainer.trainer import TrainerError

_log = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None]]


class WeightsQueue:
    """`on_lost` is called when an order failed: the weights are not what they should be."""

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self.on_lost = on_lost
        self.lost = False
        self._work: asyncio.Queue[tuple[Work, bool, Callable[[], None]]] = asyncio.Queue()

    def put(self, work: Work, skipped: Callable[[], None] = lambda: None) -> None:
        """`skipped` is called instead if the weights are lost when its turn comes."""
        self._work.put_nowait((work, False, skipped))

    def put_reset(self, work: Work) -> None:
        """Work that sets the weights, whatever they are: the end of being lost."""
        self._work.put_nowait((work, True, lambda: None))

    def lose(self, why: str) -> None:
        """The weights are gone, or worthless. What is queued before the next reset is skipped."""
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
