"""One connection to p2pd as `protocol.frames.Stream`, on any asyncio loop.

Decides how much is read ahead, when a write counts as done, and what a stall or a broken connection
is called. Knows bytes and timeouts only; who is at the other end is `transport.py`'s business.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import cast

from protocol.frames import BytesLike, Stalled, Truncated
from protocol.limits import CHUNK_BYTES

READ_AHEAD_BYTES = 4 * CHUNK_BYTES  # held per stream before the daemon has to wait
SOCKET_BUFFER_BYTES = 4 * CHUNK_BYTES  # towards p2pd: a chunk fits while the last one is taken
WRITES_WITHOUT_PAUSE = 8  # then the loop gets its turn: a fast sender must not starve the others
CLOSE_S = 10.0


class P2pdStream(asyncio.Protocol):
    """One connection to p2pd: `protocol.frames.Stream` on any asyncio loop.

    It is in `alive`, its owner's set, until the connection is gone. Timers run only while a call
    really waits: a timeout around every call took a tenth of the throughput.
    """

    def __init__(self, alive: set[P2pdStream]) -> None:
        self._alive = alive
        alive.add(self)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._aborted = False
        self._chunks: deque[bytes] = deque()
        self._offset = 0  # into the first chunk
        self._buffered_bytes = 0
        self._ended = False
        self._broken = False
        self._reading_paused = False
        self._writing_paused = False
        self._writes = 0
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self.remote_address = ""
        self.peer_id = b""  # who is at the other end, once that is known
        self.heard_s = 0.0  # by the loop's clock

    # --- what the loop tells us -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._aborted:  # nobody wants it any more
            self._transport.abort()
            return
        # 0: a write returns when the kernel has all of it, so that the data may be reused.
        self._transport.set_write_buffer_limits(high=0)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                raw.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        self.heard_s = self._loop.time()
        if self._buffered_bytes > READ_AHEAD_BYTES and not self._reading_paused:
            self._reading_paused = True
            assert self._transport is not None
            self._transport.pause_reading()
        _wake(self._readable)

    def eof_received(self) -> bool:
        self._ended = True
        _wake(self._readable)
        return True  # we close it ourselves, when we are through

    def connection_lost(self, error: Exception | None) -> None:
        self._broken = self._broken or error is not None
        self._ended = True
        self._writing_paused = True
        self._alive.discard(self)
        _wake(self._readable)
        _wake(self._writable)
        _wake(self._closed)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        _wake(self._writable)

    # --- protocol.frames.Stream -----------------------------------------------------------------

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        if not self._chunks:
            if not self._ended:
                self._readable = self._loop.create_future()
                await self._wait(self._readable, timeout_s)
            if not self._chunks:
                if self._broken:
                    raise Truncated("the connection broke")
                return b""
        chunk = self._chunks[0]
        if self._offset == 0 and len(chunk) <= max_bytes:
            self._chunks.popleft()
        else:
            start, end = self._offset, self._offset + max_bytes
            if end < len(chunk):
                self._offset = end
            else:
                self._chunks.popleft()
                self._offset = 0
            chunk = chunk[start:end]
        self._buffered_bytes -= len(chunk)
        if self._reading_paused and self._buffered_bytes <= READ_AHEAD_BYTES // 2:
            self._reading_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        return chunk

    async def write(self, data: BytesLike, timeout_s: float) -> None:
        self._check_writable()
        assert self._transport is not None
        self._transport.write(data)
        if self._writing_paused:
            self._writable = self._loop.create_future()
            await self._wait(self._writable, timeout_s)
            self._check_writable()
            self._writes = 0
            return
        self._writes += 1
        if self._writes >= WRITES_WITHOUT_PAUSE:
            self._writes = 0
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Let what was written go out, then end it. Whatever happens meanwhile, it ends."""
        if self._transport is None:
            return
        self._transport.close()
        try:
            await self.gone(CLOSE_S)
        finally:
            self.abort()

    def abort(self) -> None:
        """End it now, also if it is still being made. The second time nothing happens."""
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def quiet(self) -> bool:
        """Whether it is open both ways and nothing waits to be read: another question can go."""
        alive = self._transport is not None and not self._transport.is_closing()
        return alive and not self._ended and not self._chunks and not self._writing_paused

    async def gone(self, timeout_s: float) -> None:
        """Wait until the loop has let go of the connection: a turn after an `abort`."""
        if not self._closed.done():
            await asyncio.wait({self._closed}, timeout=timeout_s)  # must not cancel it

    def _check_writable(self) -> None:
        if self._transport is None or self._closed.done() or self._transport.is_closing():
            raise Truncated("the peer closed the stream while we were sending")

    async def _wait(self, future: asyncio.Future[None], timeout_s: float) -> None:
        timer = self._loop.call_later(timeout_s, _expire, future)
        try:
            await future
        finally:
            timer.cancel()


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def _expire(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(Stalled("no byte moved in time"))
