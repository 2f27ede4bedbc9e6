"""What a node answers on an incoming stream: which handler, under which limits, counted how.

Decides the order of an exchange (request, place, handler, answer, ledger), which errors end a
stream, and after how long a bulk answer's place may go to somebody else. Answers by itself whatever
needs no trainer: hello, run file, peers' records, ping. The worker adds its own kinds with `serve`.
Knows streams only as `protocol.frames.Stream`: nothing of p2pd, so that any transport can bring
them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from node.network.gate import Gate, Place
from protocol import frames, messages
from protocol.errors import WireError
from protocol.frames import BytesLike, Channel, Chunks, Deadline, Head, Stream, StreamEnded
from protocol.identity import peer_text
from protocol.ledger import Ledger
from protocol.limits import (
    BLOCK_NONE,
    BULK_DEADLINE_S,
    BULK_GRACE_S,
    BULK_LEAST_BYTES_PER_S,
    CE_MAX_NATS,
    CONCURRENT_TRANSFERS,
    CONTROL_DEADLINE_S,
    EXCHANGES_PER_STREAM,
    RESTS_S,
    TRANSFERS_PER_PEER,
    UPDATE_TRANSFERS,
    UPDATES_PER_PEER,
    Kind,
)
from protocol.messages import ErrorCode, Message, Purpose, purpose_of
from protocol.payloads import pack_records
from protocol.records import SignedRecord
from protocol.version import PACKAGE_VERSION

AGENT = f"blockswarm/{PACKAGE_VERSION}"
STREAMS = 64  # incoming ones at once, of all peers; each has one buffer of at most 1 MiB
TURNED_AWAY = 32  # further ones that are heard, only to be told `busy`
RESTING = 128  # further ones between two questions: they cost a descriptor and no work
_log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Reply:
    """An answer with its payload. `Chunks` are made while they are sent."""

    message: Message
    payload: BytesLike | Chunks = b""

    @property
    def size_bytes(self) -> int:
        return self.payload.size_bytes if isinstance(self.payload, Chunks) else len(self.payload)


Handler = Callable[[Any, bytes], Awaitable[Reply]]  # (request, the caller's peer id)
# (request, size of its payload, the caller's peer id): refuses by raising, before a byte is read.
Admit = Callable[[Any, int, bytes], AbstractContextManager[object]]
Taker = Callable[[Any, bytes, bytes], Awaitable[Reply]]  # (request, payload, the caller's peer id)


@dataclass(frozen=True)
class _Entry:
    handler: Handler
    bulk: bool


@dataclass(frozen=True)
class _Intake:
    """A request that brings a payload."""

    admit: Admit
    taker: Taker


# After these the responder cannot know where the next frame begins.
_ENDS_STREAM = {
    ErrorCode.MALFORMED,
    ErrorCode.VERSION,
    ErrorCode.UNKNOWN_KIND,
    ErrorCode.OVERSIZE,
    ErrorCode.DIGEST,
    ErrorCode.TOO_SLOW,
}


class _StreamPlace:
    """A stream's place. In the lobby it is only told `busy`, until it can move up. Between two
    questions it rests, and takes no place from others."""

    def __init__(self, peer_id: bytes, streams: Gate, lobby: Gate, resting: Gate) -> None:
        self._peer_id, self._streams, self._lobby = peer_id, streams, lobby
        self._resting = resting
        self._held = ExitStack()
        self._up = False

    def __enter__(self) -> Self:
        if self.move_up() is not None:
            self._held.enter_context(self._lobby.enter(self._peer_id))
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def move_up(self) -> frames.Busy | None:
        """Take a real place if there is one; None if it has one."""
        if not self._up:
            found = ExitStack()
            try:
                found.enter_context(self._streams.enter(self._peer_id))
            except frames.Busy as busy:
                return busy
            self._held.close()
            self._held, self._up = found, True
        return None

    def rest(self) -> bool:
        """Give the place back until the next question. False if too many do so already: then it is
        kept, for as long as a question may take, since whoever asked counts on the stream."""
        found = ExitStack()
        try:
            found.enter_context(self._resting.enter(self._peer_id))
        except frames.Busy:
            return False
        self._held.close()
        self._held, self._up = found, False
        return True


class Service:
    """The handlers of a node. One object for all transports that it listens on.

    `gate` has the places for bulk, `updates` those for updates: whoever downloads the past, slowly
    or not, does not keep a round from going on. `up_bytes_per_s` is what the owner lets us send.
    """

    def __init__(
        self,
        ledger: Ledger,
        gate: Gate | None = None,
        streams: Gate | None = None,
        control_deadline_s: float = CONTROL_DEADLINE_S,
        bulk_deadline_s: float = BULK_DEADLINE_S,
        updates: Gate | None = None,
        up_bytes_per_s: float | None = None,
    ) -> None:
        self.ledger = ledger
        self.gate = gate or Gate(CONCURRENT_TRANSFERS, TRANSFERS_PER_PEER)
        self.updates = updates or Gate(UPDATE_TRANSFERS, UPDATES_PER_PEER)
        self._least_bytes_per_s = float(BULK_LEAST_BYTES_PER_S)
        if up_bytes_per_s is not None:  # a peer is not slow because we are
            share = up_bytes_per_s / (CONCURRENT_TRANSFERS + UPDATE_TRANSFERS)
            self._least_bytes_per_s = min(self._least_bytes_per_s, share)
        self._streams = streams or Gate(STREAMS)
        self._lobby = Gate(TURNED_AWAY)
        self._resting = Gate(RESTING)
        self._control_deadline_s = control_deadline_s
        self._bulk_deadline_s = bulk_deadline_s
        self._entries: dict[Kind, _Entry] = {}
        self._intakes: dict[Kind, _Intake] = {}

    def serve(
        self, request: type[M], handler: Callable[[M, bytes], Awaitable[Reply]], bulk: bool = False
    ) -> None:
        """Answer `request` with `handler`. `bulk` ones need a place and get the long deadline.

        A handler refuses by raising `frames.Refused(ErrorCode, reason)` or `frames.Busy`.
        """
        self._entries[request.KIND] = _Entry(handler, bulk)

    async def reply_to(self, request: Message, peer_id: bytes) -> Reply:
        """What the handler of a request says, whatever places there are. Raises its refusal."""
        entry = self._entries.get(request.KIND)
        if entry is None:
            raise frames.Refused(ErrorCode.UNKNOWN_KIND, "not a request that is answered here")
        async with asyncio.timeout(self._control_deadline_s):
            return await entry.handler(request, peer_id)

    @property
    def transfers(self) -> int:
        """Bulk answers under way."""
        return self.gate.inside + self.updates.inside

    def take(self, request: type[M], admit: Admit, taker: Taker) -> None:
        """Answer a `request` that brings a payload. What `admit` returns is held meanwhile."""
        self._intakes[request.KIND] = _Intake(admit, taker)

    async def on_stream(self, stream: Stream, peer_id: bytes) -> None:
        """Serve one incoming stream to its end. Leaves it closed, or aborted after an error."""
        channel = Channel(stream, self._deadline())
        try:
            with _StreamPlace(peer_id, self._streams, self._lobby, self._resting) as place:
                async with channel:
                    for _ in range(EXCHANGES_PER_STREAM):
                        if not await self._exchange(channel, peer_id, place):
                            break
                        rests = place.rest()
                        channel.deadline = (
                            Deadline.after(RESTS_S, RESTS_S) if rests else self._deadline()
                        )
        except frames.Busy:
            stream.abort()  # even the lobby is full: nobody can hold all of it
        except WireError as error:
            _log.debug("stream of %s: %s", peer_text(peer_id), error)

    async def _exchange(self, channel: Channel, peer_id: bytes, place: _StreamPlace) -> bool:
        """One request and its answer; whether the stream goes on."""
        purpose, block = int(Purpose.CONTROL), BLOCK_NONE
        try:
            try:
                head = await channel.receive_head()
                channel.deadline = self._deadline()  # the wait for a question was not its sender's
                request = messages.decode_message(head)
                purpose, block = purpose_of(request)
                if (busy := place.move_up()) is not None:
                    await channel.receive_payload(head, lambda data: None)
                    raise busy
                if request.KIND in self._intakes:
                    reply: Reply | None = await self._take(channel, head, request, peer_id)
                else:
                    reply = await self._answer(channel, request, peer_id)
            except StreamEnded:
                return False
            except frames.Truncated:
                raise
            except Exception as error:
                return await self._refuse(channel, error)
            if reply is not None:
                await self._send(channel, reply)
            return True
        finally:
            self._book(channel, peer_id, purpose, block)

    async def _answer(self, channel: Channel, request: Message, peer_id: bytes) -> Reply | None:
        """The answer to send; None if it was sent already, while its place was held."""
        entry = self._entries.get(request.KIND)
        if entry is None or not entry.bulk:
            return await self.reply_to(request, peer_id)
        gate = self.updates if request.KIND is Kind.UPDATE_REQUEST else self.gate
        with gate.enter(peer_id) as place:
            reply = await self.reply_to(request, peer_id)
            channel.deadline = Deadline.after(self._bulk_deadline_s)
            await self._send_in(place, channel, reply)
            return None

    async def _send_in(self, place: Place, channel: Channel, reply: Reply) -> None:
        """Send a bulk answer, unless it takes so long that its place goes to somebody else."""
        now_s = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(None) as until:
                fair_s = self._fair_s(reply.size_bytes)
                place.fair_for(fair_s, lambda: until.reschedule(now_s()))
                await self._send(channel, reply)
        except TimeoutError as error:
            raise frames.Truncated("read too slowly, and others wait for the place") from error

    async def _take(self, channel: Channel, head: Head, request: Message, peer_id: bytes) -> Reply:
        intake = self._intakes[request.KIND]
        payload = bytearray()
        try:
            held = intake.admit(request, head.payload_bytes, peer_id)
        except WireError:
            # It is on its way already: read past it, or the next frame would not be found.
            await channel.receive_payload(head, lambda data: None)
            raise
        with held:
            await channel.receive_payload(head, payload.extend)
            async with asyncio.timeout(self._control_deadline_s):
                return await intake.taker(request, bytes(payload), peer_id)

    async def _send(self, channel: Channel, reply: Reply) -> None:
        """After an error half of a frame may be out: no answer can follow, the stream is over."""
        try:
            await messages.send(channel, reply.message, reply.payload)
        except Exception as error:
            if not isinstance(error, WireError):
                _log.exception("a payload could not be made", exc_info=error)
            raise frames.Truncated(str(error)) from error

    async def _refuse(self, channel: Channel, error: Exception) -> bool:
        message = refusal(error)
        if isinstance(message, messages.BusyReply):
            await messages.send(channel, message)
            return True
        channel.deadline = self._deadline()  # a request that came too late still gets its reason
        await messages.send(channel, message)
        if message.code in _ENDS_STREAM:
            await self._until_closed(channel)
            return False
        return True

    async def _until_closed(self, channel: Channel) -> None:
        """Let the peer read our last words: p2pd drops what is under way when we close first."""
        deadline = self._deadline()  # of all of it: a byte now and then must not hold the place
        for _ in range(64):
            data = await channel.stream.read(4096, deadline.timeout_s())
            channel.tally.bytes_in += len(data)  # what it had sent already
            if not data:
                return

    def _fair_s(self, size_bytes: int) -> float:
        """How long a peer may take to read a bulk answer while others wait for its place."""
        return BULK_GRACE_S + size_bytes / self._least_bytes_per_s

    def _deadline(self) -> Deadline:
        return Deadline.after(self._control_deadline_s)

    def _book(self, channel: Channel, peer_id: bytes, purpose: int, block: int) -> None:
        self.ledger.book(channel.tally, peer_text(peer_id), purpose, block)


def refusal(error: Exception) -> messages.BusyReply | messages.ErrorReply:
    """What a peer is told whose request failed."""
    if isinstance(error, frames.Busy):
        return messages.BusyReply(retry_after_s=error.retry_after_s)
    if isinstance(error, frames.Refused):
        return messages.ErrorReply(code=error.code, reason=error.reason)
    if not isinstance(error, WireError):
        _log.exception("a handler failed", exc_info=error)
    return messages.error_reply(error)


# --- what needs no trainer ----------------------------------------------------------------------


@dataclass(frozen=True)
class Status:
    """What a node says of itself in a hello."""

    role: int
    round: int
    blocks: tuple[int, ...] = ()
    ce_nats: float | None = None  # of the consensus, as measured here last
    own_ce_nats: float | None = None  # of the running weights, likewise


def sayable_ce(nats: float | None) -> float:
    """As a hello says it: 0 is none, or one that is no number."""
    return nats if nats is not None and 0 < nats < CE_MAX_NATS else 0.0


def serve_basics(
    service: Service,
    run_id: bytes,
    run_file: bytes,
    status: Callable[[], Status],
    records: Callable[[int, int], Awaitable[list[SignedRecord]]],
    clock: Callable[[], float] = time.time,
) -> None:
    """Answer hello, run, peers and ping. `records` is given (block, cap)."""

    def check_run(run: bytes) -> None:
        if run != run_id:
            raise frames.Refused(ErrorCode.WRONG_RUN, "this peer is part of another run")

    async def hello(request: messages.Hello, _: bytes) -> Reply:
        if request.run:
            check_run(request.run)
        now = status()
        return Reply(
            messages.HelloReply(
                run=run_id,
                role=now.role,
                round=now.round,
                now_s=clock(),
                blocks=now.blocks,
                agent=AGENT,
                ce_nats=sayable_ce(now.ce_nats),
                own_ce_nats=sayable_ce(now.own_ce_nats),
            )
        )

    async def run(request: messages.RunRequest, _: bytes) -> Reply:
        check_run(request.run)
        return Reply(messages.RunReply(run=run_id), run_file)

    async def peers(request: messages.PeersRequest, _: bytes) -> Reply:
        check_run(request.run)
        found = (await records(request.block, request.cap))[: request.cap]
        return Reply(messages.PeersReply(count=len(found)), pack_records(found))

    async def ping(request: messages.Ping, _: bytes) -> Reply:
        under_way = service.transfers
        return Reply(messages.Pong(nonce=request.nonce, now_s=clock(), transfers=under_way))

    service.serve(messages.Hello, hello)
    service.serve(messages.RunRequest, run)
    service.serve(messages.PeersRequest, peers)
    service.serve(messages.Ping, ping)
