"""The outputs of one HTTP request, written by the swarm concurrently.

Their pieces come in the order in which they are ready; an output ends at its stop sequence. Leaving
the context cancels all of them and their sweeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from node.gateway.request import Wanted
from node.gateway.text import TextStream
from node.serving.client import SweepClient
from node.serving.output import Order, Output

AHEAD = 64  # pieces buffered for a slow reader, before the outputs have to wait


@dataclass(frozen=True)
class OutputPlan:
    """How outputs are written. `draft_length` as in `node.serving.output.Order`."""

    mode: str = "one-sweep"
    drafts: int = 8
    draft_length: int | None = None


@dataclass(frozen=True)
class SaidTokens:
    """A piece of an output's text. The last one also has its finish reason, size and figures."""

    index: int
    text: str
    finish: str | None = None
    size_bytes: int = 0
    figures: dict[str, Any] | None = None


class Outputs:
    """Use as `async with Outputs(...) as outputs: async for said in outputs.said()`."""

    def __init__(self, client: SweepClient, wanted: Wanted, plan: OutputPlan) -> None:
        self.client, self.wanted, self.plan = client, wanted, plan
        self._queue: asyncio.Queue[SaidTokens | Exception] = asyncio.Queue(AHEAD)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Outputs:
        self._tasks = [
            asyncio.create_task(self._write(index)) for index in range(self.wanted.outputs)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def said(self) -> AsyncIterator[SaidTokens]:
        """Yield all pieces of all outputs. Raises the first error."""
        left = self.wanted.outputs
        while left:
            piece = await self._queue.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece.finish is not None
            yield piece

    def fail(self, error: Exception) -> None:
        """Cancel all outputs, drop pending pieces, and make `said` raise this error."""
        for task in self._tasks:
            task.cancel()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    async def _write(self, index: int) -> None:
        try:
            await self._write_one(index)
        except Exception as error:
            await self._queue.put(error)

    async def _write_one(self, index: int) -> None:
        wanted, plan = self.wanted, self.plan
        prompt, sampling = wanted.prompts[index // wanted.n], wanted.samplings[index % wanted.n]
        order = Order(prompt, wanted.length, sampling, plan.drafts, plan.draft_length)
        output, text = Output(self.client, order), TextStream(wanted.stops)
        async with aclosing(cast(AsyncGenerator[bytes, None], output.write())) as pieces:
            async for piece in pieces:
                if sayable := text.add(piece):
                    await self._queue.put(SaidTokens(index, sayable))
                if text.stopped:
                    break
        figures = {
            "mode": plan.mode,
            "prompt_bytes_read": min(len(prompt), self.client.run.model.context),
            "traversals": output.figures.traversals,
            "failures": output.figures.failures,
            "seconds": round(output.figures.seconds, 4),
            "missing_blocks": list(output.figures.missing),
        }
        finish = "stop" if text.stopped else "length"
        await self._queue.put(SaidTokens(index, text.end(), finish, text.size_bytes, figures))
