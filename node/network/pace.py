"""Rates: how fast a host sends and receives, as its owner allows.

Decides when the next piece of a stream may move. Small messages (votes, records, questions) never
wait, but are counted, so that bulk makes room for them: a vote that waits behind a snapshot misses
its round. Knows streams only as `protocol.frames.Stream`, and nothing of what is in them.

Known limit: what was sent to us is on the wire before we read it. We read slowly, and the sender
stops when the buffers on the way (some MiB per stream) are full; so a burst of that size passes at
full speed, and the rate holds from there on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from protocol.frames import BytesLike, Stalled, Stream

PIECE_BYTES = 16 * 1024  # streams take turns in pieces of this size
SMALL_BYTES = 16 * 1024  # a message up to this size does not wait
BURST_S = 0.25  # what an idle host may move at once, in seconds of its rate
# What small messages may take from bulk in advance. Without an end to it a minute of them, which
# never wait, left bulk without a turn for minutes: longer than anybody waits for a byte.
DEBT_S = 2.0
LEAST_BYTES_PER_S = 8 * 1024  # below it a piece would take longer than a peer waits for a byte


class Rate:
    """Bytes per second of one direction, over all streams."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = max(float(bytes_per_s), LEAST_BYTES_PER_S)
        self._clock = clock
        self._free_s = clock()  # when all that was moved would have been moved at this rate

    def wait_s(self) -> float:
        """How long the next piece has to wait."""
        return max(0.0, self._free_s - self._clock())

    def moved(self, size_bytes: int, waits: bool = True) -> None:
        """Count it. What never `waits` leaves bulk a debt, which is bounded by DEBT_S."""
        now_s = self._clock()
        free_s = max(self._free_s, now_s - BURST_S) + size_bytes / self.bytes_per_s
        if not waits:
            free_s = min(free_s, max(self._free_s, now_s + DEBT_S))
        self._free_s = free_s


class PacedStream:
    """A stream that keeps to the rates. A rate of None is no limit."""

    def __init__(self, stream: Stream, up: Rate | None, down: Rate | None) -> None:
        self.stream, self._up, self._down = stream, up, down
        self._read_bytes = 0  # since we last wrote: the length of what we are being told

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        if self._down is None:
            return await self.stream.read(max_bytes, timeout_s)
        bulk = self._read_bytes >= SMALL_BYTES
        if bulk:
            await _turn(self._down, timeout_s)
        data = await self.stream.read(min(max_bytes, PIECE_BYTES), timeout_s)
        self._read_bytes += len(data)
        self._down.moved(len(data), waits=bulk)
        return data

    async def write(self, data: BytesLike, timeout_s: float) -> None:
        self._read_bytes = 0
        if self._up is None:
            await self.stream.write(data, timeout_s)
            return
        view = memoryview(data).cast("B")
        bulk = len(view) > SMALL_BYTES
        for start in range(0, len(view), PIECE_BYTES):
            if bulk:
                await _turn(self._up, timeout_s)
            piece = view[start : start + PIECE_BYTES]
            self._up.moved(len(piece), waits=bulk)
            await self.stream.write(piece, timeout_s)

    async def close(self) -> None:
        await self.stream.close()

    def abort(self) -> None:
        self.stream.abort()


async def _turn(rate: Rate, timeout_s: float) -> None:
    """Wait once, not until the rate is idle: streams that wait together then take turns."""
    wait_s = rate.wait_s()
    if wait_s > timeout_s:
        raise Stalled("the rate that this host is allowed leaves no room before the deadline")
    if wait_s > 0:
        await asyncio.sleep(wait_s)
