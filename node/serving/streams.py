"""Streams that serving keeps open to other peers, one per peer, with pipelined requests.

Requests do not wait for earlier answers; answers come in the order of the requests. When a host
dies its streams end, which is noticed at once. A stream per request would cost a round trip and one
of the peer's limited places.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, TypeVar

from node.network.network import Network
from node.network.p2pd_stream import P2pdStream
from protocol import messages
from protocol.errors import WireError
from protocol.frames import Channel, Deadline, Stalled, Tally, Truncated
from protocol.identity import peer_text
from protocol.limits import BLOCK_NONE, EXCHANGES_PER_STREAM
from protocol.messages import Message, Purpose

R = TypeVar("R", bound=Message)

IDLE_S = 5.0  # well before a responder gives it up
BRIEF_IDLE_S = 0.5
OTHERS = 16  # requests of others that may come between the parts of one sweep
ANSWER_S = 60.0  # every request has a shorter timeout of its own


class PeerStream:
    """One stream with pipelined requests. `lost` is set if it ends before it is retired."""

    def __init__(self, stream: P2pdStream, idle_s: float) -> None:
        self.idle_s = idle_s
        self.retired = False
        self._assigned = self._answered = 0  # counts of requests
        self._told = Tally()
        self.lost: asyncio.Future[WireError] = asyncio.get_running_loop().create_future()
        self._stream = stream
        # Two channels on one stream, since reading and writing have separate deadlines.
        self._out = Channel(stream, Deadline.after(ANSWER_S))
        self._in = Channel(stream, Deadline.after(ANSWER_S))
        self._expected: deque[tuple[type[Message], asyncio.Future[Any]]] = deque()
        self._sending = asyncio.Lock()
        self._frame: asyncio.Task[None] | None = None  # the one that is being sent
        self._reader = asyncio.create_task(self._read())

    @property
    def usable(self) -> bool:
        return not self.retired and not self.lost.done()

    def has_room(self, questions: int) -> bool:
        """Whether so many more requests fit on this stream."""
        return self.usable and self._assigned + questions <= EXCHANGES_PER_STREAM

    def assign(self) -> None:
        """Count one more request; the last one that the protocol allows retires the stream."""
        self._assigned += 1
        self.retired = self.retired or self._assigned >= EXCHANGES_PER_STREAM

    def retire(self) -> None:
        """Take no new requests; end as soon as all earlier ones are answered."""
        self.retired = True
        if self._answered == self._assigned:
            self._stream.abort()

    async def ask(
        self, request: Message, wanted: type[R], seconds: float, payload: bytes = b""
    ) -> R:
        """The answer to one request. A failure or timeout ends the stream for all requests."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        try:
            await self._sending.acquire()
        except BaseException:
            self._assigned -= 1
            raise
        # The caller may be cancelled; half a frame would break the stream for all the others.
        self._frame = asyncio.create_task(self._send(request, payload, seconds, wanted, answer))
        self._frame.add_done_callback(_heard)
        await asyncio.shield(self._frame)
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            late = Stalled("no answer in time")
            self._end(late)
            raise late from None

    async def _send(
        self,
        request: Message,
        payload: bytes,
        seconds: float,
        wanted: type[R],
        answer: asyncio.Future[R],
    ) -> None:
        """Send one whole frame. The caller has acquired `_sending`, which is released here."""
        try:
            if self.lost.done():
                raise self.lost.result()
            self._expected.append((wanted, answer))
            self._out.deadline = Deadline.after(seconds, seconds)
            await messages.send(self._out, request, payload)
        except WireError as error:
            self._end(error)
            raise
        finally:
            self._sending.release()

    async def _read(self) -> None:
        try:
            while await self._read_answer():
                pass
        except WireError as error:
            self._end(error)

    async def _read_answer(self) -> bool:
        """Read the answer to the oldest request; False if the stream is not needed any longer."""
        before = self._in.tally.bytes_in
        wait_s = ANSWER_S if self._expected else self.idle_s
        self._in.deadline = Deadline.after(wait_s + ANSWER_S, wait_s)  # an answer may just begin
        try:
            message = messages.decode_message(await self._in.receive_head(0))
        except Stalled:
            if self._in.tally.bytes_in != before:
                raise
            if self._answered < self._assigned:  # asked just now
                return True
            self.retired = True
            self._stream.abort()
            return False
        if not self._expected:
            raise Truncated("an answer to nothing")
        wanted, answer = self._expected.popleft()
        self._answered += 1
        try:
            result = messages.expect(message, wanted)
        except WireError as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(result)
        if self.retired and self._answered == self._assigned:
            self._stream.abort()
            return False
        return True

    def _end(self, error: WireError) -> None:
        self._stream.abort()
        if not self.lost.done() and not self.retired:
            self.lost.set_result(error)
        while self._expected:
            _, answer = self._expected.popleft()
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # marks it as retrieved: the caller may be gone

    async def close(self) -> None:
        self._end(Truncated("closed"))
        self._reader.cancel()
        ending = [self._reader, *([self._frame] if self._frame else [])]
        await asyncio.gather(*ending, return_exceptions=True)

    def take_tally(self) -> Tally:
        """Bytes and frames since the last call."""
        read, sent, old = self._in.tally, self._out.tally, self._told
        now = Tally(read.bytes_in, sent.bytes_out, read.frames_in, sent.frames_out)
        self._told = now
        return Tally(
            now.bytes_in - old.bytes_in,
            now.bytes_out - old.bytes_out,
            now.frames_in - old.frames_in,
            now.frames_out - old.frames_out,
        )


def _heard(frame: asyncio.Task[None]) -> None:
    """Mark the error as retrieved: it has ended the stream, and the caller may be gone."""
    if not frame.cancelled():
        frame.exception()


class ServingStreams:
    """One open stream per peer, opened on demand."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._streams: dict[bytes, PeerStream] = {}
        self._old: list[PeerStream] = []
        self._opening: dict[bytes, asyncio.Lock] = {}
        self._closed = False

    async def ask(
        self,
        peer_id: bytes,
        request: Message,
        wanted: type[R],
        seconds: float,
        payload: bytes = b"",
        block: int = BLOCK_NONE,
        brief: bool = False,
    ) -> tuple[R, PeerStream]:
        """The answer and its stream. `brief`: the stream will hardly be needed again."""
        stream = await self._stream(peer_id, seconds, BRIEF_IDLE_S if brief else IDLE_S)
        try:
            return await stream.ask(request, wanted, seconds, payload), stream
        finally:
            self.book(peer_id, stream, block)

    def book(self, peer_id: bytes, stream: PeerStream, block: int = BLOCK_NONE) -> None:
        tally = stream.take_tally()
        self.network.ledger.book(tally, peer_text(peer_id), Purpose.SERVING, block)

    async def with_room(self, peer_id: bytes, seconds: float, questions: int) -> PeerStream:
        """A stream with room for so many requests; `assign` and `ask` each of them on it."""
        return await self._stream(peer_id, seconds, IDLE_S, questions + OTHERS)

    async def _stream(
        self, peer_id: bytes, seconds: float, idle_s: float, questions: int = 0
    ) -> PeerStream:
        """A stream with room for so many requests; with 0, one request is assigned here."""
        lock = self._opening.setdefault(peer_id, asyncio.Lock())
        try:
            async with lock:
                current = self._streams.get(peer_id)
                if current is not None and current.has_room(max(1, questions)):
                    if not questions:
                        current.assign()
                    return current
                if current is not None:
                    current.retire()
                self._forget()
                known = self.network.discovery.book.addresses(peer_id)
                deadline = Deadline.after(seconds, seconds)
                opened = await self.network.transport.dial(peer_id, known, deadline)
                if self._closed:
                    opened.abort()
                    raise Truncated("closed")
                self._streams[peer_id] = stream = PeerStream(opened, idle_s)
                if not questions:
                    stream.assign()
                return stream
        finally:
            if not lock.locked() and self._opening.get(peer_id) is lock:
                del self._opening[peer_id]

    def _forget(self) -> None:
        """Drop streams that have ended; retired ones are kept until they are answered."""
        for peer_id, stream in list(self._streams.items()):
            if not stream.usable:
                self._old.append(self._streams.pop(peer_id))
        self._old = [stream for stream in self._old if not stream._reader.done()]

    async def close(self) -> None:
        self._closed = True
        every = [*self._streams.values(), *self._old]
        self._streams, self._old = {}, []
        await asyncio.gather(*(stream.close() for stream in every))
