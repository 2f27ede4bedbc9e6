"""Streams that serving keeps open to other peers: many questions under way on one of them.

Decides that a peer gets one stream, that frames follow each other on it without waiting for the
answers (which come in the order of the questions), when it is replaced, and that its end is noticed
at once: a host that dies with a sweep in its hands ends its streams. Opening a stream for every
question would cost a round trip, and a place at the peer. Knows messages, not sweeps.
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
OTHERS = 16  # questions that others may put in between those which must follow each other
ANSWER_S = 60.0  # every question has a shorter time of its own


class PeerStream:
    """One stream. `lost` is done when it ended although we still wanted it."""

    def __init__(self, stream: P2pdStream, idle_s: float) -> None:
        self.idle_s = idle_s
        self.retired = False
        self._assigned = self._answered = 0  # questions
        self._told = Tally()
        self.lost: asyncio.Future[WireError] = asyncio.get_running_loop().create_future()
        self._stream = stream
        # Two channels on one stream, since reading and writing have deadlines of their own.
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
        """Whether so many more can be asked on it."""
        return self.usable and self._assigned + questions <= EXCHANGES_PER_STREAM

    def assign(self) -> None:
        """One more question will be asked; after the last that the peer hears it is retired."""
        self._assigned += 1
        self.retired = self.retired or self._assigned >= EXCHANGES_PER_STREAM

    def retire(self) -> None:
        """It ends as soon as all that was asked on it is answered."""
        self.retired = True
        if self._answered == self._assigned:
            self._stream.abort()

    async def ask(
        self, request: Message, wanted: type[R], seconds: float, payload: bytes = b""
    ) -> R:
        """The answer to one question. What goes wrong on the way ends the stream for all."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        try:
            await self._sending.acquire()
        except BaseException:
            self._assigned -= 1
            raise
        # Whoever asks may be cancelled; half of a frame would end the stream for all the others.
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
        """A whole frame, with the turn to send held."""
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
        """One answer to the oldest question; False if the stream is not needed any longer."""
        before = self._in.tally.bytes_in
        wait_s = ANSWER_S if self._expected else self.idle_s
        self._in.deadline = Deadline.after(wait_s + ANSWER_S, wait_s)  # an answer may just begin
        try:
            message = messages.decode(await self._in.receive_head(0))
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
                answer.exception()  # whoever asked may be gone

    async def close(self) -> None:
        self._end(Truncated("closed"))
        self._reader.cancel()
        ending = [self._reader, *([self._frame] if self._frame else [])]
        await asyncio.gather(*ending, return_exceptions=True)

    def take_tally(self) -> Tally:
        """Bytes and frames since it was last asked for."""
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
    """What went wrong has ended the stream; whoever asked may be gone."""
    if not frame.cancelled():
        frame.exception()


class StreamPool:
    """One stream to every peer that is spoken with."""

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
        """The answer, and the stream that it came on. `brief`: it will not be needed again."""
        stream = await self._stream(peer_id, seconds, BRIEF_IDLE_S if brief else IDLE_S)
        try:
            return await stream.ask(request, wanted, seconds, payload), stream
        finally:
            self.book(peer_id, stream, block)

    def book(self, peer_id: bytes, stream: PeerStream, block: int = BLOCK_NONE) -> None:
        tally = stream.take_tally()
        self.network.ledger.book(tally, peer_text(peer_id), Purpose.SERVING, block)

    async def with_room(self, peer_id: bytes, seconds: float, questions: int) -> PeerStream:
        """A stream on which so many can follow each other: `assign` and `ask` each of them."""
        return await self._stream(peer_id, seconds, IDLE_S, questions + OTHERS)

    async def _stream(
        self, peer_id: bytes, seconds: float, idle_s: float, questions: int = 0
    ) -> PeerStream:
        """`questions`: how many it must have room for; with 0 one is assigned here."""
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
        """Drop what has ended; what is only retired still waits for answers."""
        for peer_id, stream in list(self._streams.items()):
            if not stream.usable:
                self._old.append(self._streams.pop(peer_id))
        self._old = [stream for stream in self._old if not stream._reader.done()]

    async def close(self) -> None:
        self._closed = True
        every = [*self._streams.values(), *self._old]
        self._streams, self._old = {}, []
        await asyncio.gather(*(stream.close() for stream in every))
