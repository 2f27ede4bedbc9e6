"""Frames without an event loop: a stream in memory that never waits, and what drives it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from protocol.frames import BytesLike

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine that never really waits: no event loop at all."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("awaited something other than the stream")


class BytesStream:
    """What was written can be read, in pieces of at most `piece`."""

    def __init__(self, data: bytes = b"", piece: int = 1 << 30) -> None:
        self.data = bytearray(data)
        self.at = 0
        self.piece = piece
        self.largest_write = 0
        self.largest_ask = 0
        self.ended = ""

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        assert timeout_s > 0
        self.largest_ask = max(self.largest_ask, max_bytes)
        chunk = bytes(self.data[self.at : self.at + min(max_bytes, self.piece)])
        self.at += len(chunk)
        return chunk

    async def write(self, data: BytesLike, timeout_s: float) -> None:
        assert timeout_s > 0
        self.largest_write = max(self.largest_write, len(data))
        self.data += data

    async def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"
