"""Two ends of a stream in memory, for what is not about the network."""

from __future__ import annotations

import asyncio

from protocol import frames
from protocol.frames import BytesLike, Stalled


class MemoryStream:
    """One end of a pair; like p2pd, the end of one side is the end of both."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.rest = b""
        self.other: MemoryStream
        self.ended = ""

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        if not self.rest:
            try:
                async with asyncio.timeout(timeout_s):
                    self.rest = await self.queue.get()
            except TimeoutError:
                raise Stalled("no byte moved in time") from None
        if not self.rest:
            self.queue.put_nowait(b"")
        part, self.rest = self.rest[:max_bytes], self.rest[max_bytes:]
        return part

    async def write(self, data: BytesLike, timeout_s: float) -> None:
        if self.ended or self.other.ended:
            raise frames.Truncated("closed")
        self.other.queue.put_nowait(bytes(data))
        await asyncio.sleep(0)  # whoever waits for this has a turn, as on a network

    async def close(self) -> None:
        self.ended = self.ended or "closed"
        self.other.queue.put_nowait(b"")

    def abort(self) -> None:
        self.ended = self.ended or "aborted"
        self.other.queue.put_nowait(b"")


def stream_pair() -> tuple[MemoryStream, MemoryStream]:
    one, two = MemoryStream(), MemoryStream()
    one.other, two.other = two, one
    return one, two
